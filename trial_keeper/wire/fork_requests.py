"""What the manager and the fork server of its keepers agree on; see `trial_keeper.host.fork_server`."""

MAX_REQUEST_BYTES = 128 * 1024
"""The maximum size of a request. A socket accepts a message of this size whole."""
FORK_SERVER = "fork-server"
"""The argument of `trial-keeper` that runs the server."""
SPACE = {"TRIAL_KEEPER_FORK_SPACE": " " * 4096}
"""A variable of the server that no program reads. Its memory has space for the settings of a keeper, about 700 bytes."""
