class MyTuner:
    """Stands for a tuner of the user's own."""
