"""Configuration of Optuna's log."""

from __future__ import annotations

import optuna


def configure_logging() -> None:
    """Send only Optuna's warnings to the manager's log; the manager itself writes a line per trial."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
