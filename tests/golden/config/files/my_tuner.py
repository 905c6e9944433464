class MyTuner:
    """An example of a tuner that a user has written."""
