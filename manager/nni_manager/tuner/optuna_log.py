"""Where Optuna's log goes."""

from __future__ import annotations

import optuna


def quieten() -> None:
    """Let Optuna's warnings reach the manager's log, and nothing else: a line per trial is the manager's to write."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
