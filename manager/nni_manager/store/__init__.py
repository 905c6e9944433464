"""The manager's persistent state: one SQLite file per experiment, and the collected logs beside it."""
