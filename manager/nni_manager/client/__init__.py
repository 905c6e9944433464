"""Starts, finds and calls the managers of this user's experiments: shared by nnictl and the Python Experiment API."""
