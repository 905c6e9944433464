"""NumPy and Optuna, each imported at its first use: the table of tuners is read without them.

`from nni_manager.tuner.lazy import np, optuna` stands for the imports. No name of theirs can be used while a module is imported.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

__all__ = ["BaseDistribution", "BaseSampler", "Floats", "FrozenTrial", "NDArray", "Study", "np", "optuna"]


class _LazyModule:
    """Passes attributes of a module on, and keeps each, so that the next access is as fast as that of an imported module."""

    def __init__(self, load: Callable[[], ModuleType]) -> None:
        self._load = functools.cache(load)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._load(), name)
        setattr(self, name, value)
        return value


def _configured_optuna() -> ModuleType:
    """Optuna, which sends only its warnings to the manager's log; the manager itself writes a line per trial."""
    loaded = importlib.import_module("optuna")
    loaded.logging.set_verbosity(loaded.logging.WARNING)
    loaded.logging.disable_default_handler()
    loaded.logging.enable_propagation()
    return loaded


if TYPE_CHECKING:
    import numpy as np
    import optuna
    from numpy.typing import NDArray
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    Floats: TypeAlias = NDArray[np.float64]
else:
    np, optuna = _LazyModule(lambda: importlib.import_module("numpy")), _LazyModule(_configured_optuna)
    # Only annotations use these types. Optuna calls a sampler's methods, and does not ask for its class.
    BaseDistribution = BaseSampler = Floats = FrozenTrial = NDArray = Study = object
