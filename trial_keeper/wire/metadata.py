"""The names of a keeper's job and token in the call's metadata, and the name in the manager's certificate."""

JOB_KEY = "trial-keeper-job"
TOKEN_KEY = "trial-keeper-token"
# The manager may move to any address; its certificate has this reserved name (RFC 2606) at all of them.
MANAGER_NAME = "manager.trial-keeper.invalid"
