"""The names under which a keeper's job and token travel in the call's metadata."""

JOB_KEY = "trial-keeper-job"
TOKEN_KEY = "trial-keeper-token"
