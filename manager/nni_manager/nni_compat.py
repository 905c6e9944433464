"""Import aliases for code that was written for NNI, in processes of the manager and in scripts of the Python API.

`import nni` imports our SDK unless the real package is installed, and `nni.experiment` our Python Experiment API. We install
no package of that name, because it would conflict with the real one. Only the standard library and nni_sdk are imported here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OF_SDK = {"tuner": "tuner", "assessor": "assessor", "utils": "utils", "recoverable": "tuner"}
# Each module by its full name: a module found through our package's path would be loaded twice, with separate classes.
_OF_MANAGER = {
    f"nni.experiment{each}": f"nni_manager.experiment{each}"
    for each in ("", ".config", ".data", ".experiment")
}


def install_import_aliases(*, experiment_is_ours: bool = False) -> None:
    """Make `import nni` import our SDK, unless the real package is installed.

    `experiment_is_ours`: `nni.experiment` is ours even then.
    """
    try:
        importlib.import_module("nni")
    except ModuleNotFoundError as error:
        if error.name != "nni":
            raise
        sys.modules["nni"] = importlib.import_module("nni_sdk")
        for name, module in _OF_SDK.items():
            sys.modules[f"nni.{name}"] = importlib.import_module(f"nni_sdk.{module}")
        experiment_is_ours = True
    if experiment_is_ours and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds modules that are imported only on demand: their import takes a second, and most code does not need them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of ours under NNI's name; None for any other module."""
        return ModuleSpec(fullname, _Alias()) if fullname in _OF_MANAGER else None


class _Alias(Loader):
    """Replaces the imported module with a module of ours."""

    def exec_module(self, module: ModuleType) -> None:
        """Import our module."""
        sys.modules[module.__name__] = importlib.import_module(_OF_MANAGER[module.__name__])
