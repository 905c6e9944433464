"""The process of a trial of a function: what the script of each trial runs, see docs/python-api.md#a-function-as-the-objective.

`nni_manager.experiment.objective` writes the files that `run_trial` reads, in a folder that only their owner can read.
"""

import json
import os
import pickle
import sys
from contextlib import suppress
from functools import reduce
from importlib import import_module

from nni_sdk import trial
from nni_sdk.errors import ObjectiveUnusable
from nni_sdk.integrations import reporter

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DESCRIPTION = "objective.json"
"""`function`: "module:name", or null; `path`: where Python finds modules; `cwd`: the current directory."""
PICKLE = "function.pickle"
"""The function if `function` is null, by cloudpickle."""
# Permissions of users other than the owner.
_OTHERS = 0o077


def run_trial(folder: str) -> None:
    """Call the function with this trial's parameters, and report what it returns as the final result.

    If it returns None, or exits with 0, the final result is what it has reported itself, or what its callbacks have. Without any
    it is null, and there is none if the trial was to stop.

    Raises:
        ObjectiveUnusable: another user could have written the function.
        SdkError: as `report_final_result`.
    """
    with open(os.path.join(folder, DESCRIPTION), encoding="utf-8") as file:
        description = json.load(file)
    path = description["path"]
    # The script's own folder is no place for modules.
    sys.path[:] = path + [each for each in sys.path if each not in path and each != folder]
    os.chdir(description["cwd"])
    name = description["function"]
    if name is None:
        function = _unpickled(os.path.join(folder, PICKLE))
        vars(sys.modules["__main__"]).update(_script_names(function))
    else:
        function = imported(name)
    parameters = trial.get_next_parameter()
    trial._trial.function_may_take_them = True
    reporter.hold_final_results()
    try:
        result = function(parameters)
    except SystemExit as end:
        if end.code:
            raise
        result = None
    if result is None and not trial._trial.final_was_reported:
        reporter.report_held_results()
    if result is not None or not (trial._trial.final_was_reported or trial.should_stop()):
        trial.report_final_result(result)


def getattr_of_script(folder: str) -> "Callable[[str], Any]":
    """Return a `__getattr__` for the main module of a process that the function starts: it finds the names of `_script_names`.

    The function is only read when such a name is needed. `__getattr__` raises ObjectiveUnusable if another user could have
    written the function.
    """
    path = os.path.join(folder, PICKLE)
    names: dict[str, Any] | None = None

    def find(name: str) -> "Any":
        nonlocal names
        if names is None and not name.startswith("__"):
            names = {}  # for the time of the reading
            names = _script_names(_unpickled(path)) if os.path.exists(path) else {}
        if names and name in names:
            return names[name]
        raise AttributeError(f"the script has no function or class {name}")

    return find


def _script_names(function: "Any") -> "dict[str, Any]":
    """Return the functions and classes of the user's script that a copied function uses, by name.

    pickle looks for them in `__main__`: when an object of such a class is saved, and when multiprocessing calls such a function.
    All functions of one copy share the names that they use of the script.
    """
    owner = function
    used: list[tuple[str, Any]] = []
    for attribute in ("func", "__func__", "__wrapped__"):  # of a partial, a method and a decorated function
        with suppress(Exception):  # any object of the user
            owner = getattr(owner, attribute, owner)
    with suppress(Exception):
        # The latter is that of an object that can be called.
        code = owner if hasattr(owner, "__globals__") else type(owner).__call__
        used += getattr(code, "__globals__", {}).items()
        used += [
            (each.__name__, each)
            for each in (owner, type(getattr(function, "__self__", function)))
            if hasattr(each, "__name__")
        ]
    return {name: each for name, each in used if _is_of_script(each)}


def _is_of_script(each: "Any") -> bool:
    with suppress(Exception):  # any object of the user
        return bool(each.__module__ == "__main__")
    return False


def imported(name: str) -> "Any":
    """Return the object of this name, "module:name"; the name may have dots."""
    module, _, within = name.partition(":")
    return reduce(getattr, within.split("."), import_module(module))


def _unpickled(path: str) -> "Any":
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
            raise ObjectiveUnusable(
                f"cannot load {path}: another user owns it, or can read or write it; resume the experiment from Python "
                "with objective=FUNCTION, which writes it again"
            )
        # Written by the user of this process, who started the experiment with this function.
        return pickle.load(file)  # noqa: S301
