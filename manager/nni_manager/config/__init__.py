"""The experiment file: what users write, checked as a whole, as one frozen model.

`reader.read_experiment_file` is the way in; `model.ExperimentConfig` is what everybody else sees.
"""
