"""The callback for Lightning as the package `lightning`: `Trainer(callbacks=[NNICallback("val_loss")])`."""

from lightning.pytorch.callbacks import Callback

from nni_sdk.integrations.lightning_hooks import LightningHooks


class NNICallback(LightningHooks, Callback):
    """The callback with the base class of this package; see `LightningHooks`."""


PyTorchLightningPruningCallback = NNICallback
"""Optuna's name."""
