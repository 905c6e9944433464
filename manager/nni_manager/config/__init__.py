"""The experiment file: reads and checks it as a whole, and returns one frozen model.

`reader.read_experiment_file` is the entry point; all other packages use `model.ExperimentConfig`.
"""
