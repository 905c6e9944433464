"""Lets code that was written for NNI find what it imports, in an interpreter of ours.

`import nni` means our SDK unless the real package is there, and `nni.experiment` our Python Experiment API. No package of that
name is installed, for it would be in the real one's way. Only the standard library and nni_sdk are imported here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OF_SDK = {"tuner": "tuner", "assessor": "assessor", "utils": "utils", "recoverable": "tuner"}
# Each module by its name: what is found below ours by its path would be loaded twice, with classes of its own.
_OF_MANAGER = {
    f"nni.experiment{each}": f"nni_manager.experiment{each}"
    for each in ("", ".config", ".data", ".experiment")
}


def answer_to_names_of_nni(*, experiment_is_ours: bool = False) -> None:
    """Let `import nni` mean our SDK, unless the real package is there.

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
    """Finds what is imported late, as it costs a second: most code that imports `nni` never does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What loads a module of ours under NNI's name."""
        return ModuleSpec(fullname, _Alias()) if fullname in _OF_MANAGER else None


class _Alias(Loader):
    """Puts a module of ours in the place of the one that is imported."""

    def exec_module(self, module: ModuleType) -> None:
        """Import ours."""
        sys.modules[module.__name__] = importlib.import_module(_OF_MANAGER[module.__name__])
