"""What survives the manager: one SQLite file per experiment, and the logs it collected beside it."""
