"""Redirects scripts to nni_manager: replacing `nni` by `nni_sdk` yields `from nni_sdk.experiment import Experiment`."""

raise ImportError(
    "cannot import experiments from nni_sdk, which is for training code; write `from nni_manager.experiment import Experiment` "
    "(`pip install 'trial-keeper[manager]'` installs it)"
)
