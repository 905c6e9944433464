"""The callback for Lightning as the package `pytorch_lightning`: `Trainer(callbacks=[NNICallback("val_loss")])`."""

from pytorch_lightning.callbacks import Callback

from nni_sdk.integrations.lightning_hooks import LightningHooks


class NNICallback(LightningHooks, Callback):
    """The callback with the base class of this package; see `LightningHooks`."""


PyTorchLightningPruningCallback = NNICallback
"""Optuna's name."""
