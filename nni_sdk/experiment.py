"""Answers `from nni_sdk.experiment import Experiment`: what a script for NNI says once `nni` is replaced throughout."""

raise ImportError(
    "cannot import experiments from nni_sdk, which is for training code; write `from nni_manager.experiment import Experiment` "
    "(`pip install 'trial-keeper[manager]'` brings it)"
)
