"""A function as the objective of an experiment: `Experiment.run(objective=f)`.

Theory of operation. Trials run a script in the folder `objective` of the experiment, which calls `nni_sdk.objective.run_trial`. A
function that its module's name leads to is imported by each trial; any other is copied by cloudpickle, and only trials load the
copy. Trials are forks of a process that has imported the installed modules which the function uses, and none of the user's own.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import io
import json
import marshal
import os
import shlex
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from nni_manager.client.experiments import KnownExperiment
from nni_manager.config.model import ExperimentSpec
from nni_manager.errors import UserError
from nni_manager.experiment import stored_config
from nni_manager.experiment.config import ExperimentConfig
from nni_manager.experiment.sections import LocalConfig
from nni_manager.store.folders import ExperimentFolder
from nni_sdk.objective import DESCRIPTION, PICKLE, imported
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.small_files import replace_file

_SCRIPT = "trial.py"
_CODE = """\
# Runs one trial of a function. trial-keeper has written this file.
from nni_sdk.objective import getattr_of_script, run_trial

if __name__ == "__main__":
    run_trial({folder!r})
else:  # multiprocessing imports this file in a process that the function starts
    __getattr__ = getattr_of_script({folder!r})
"""
_WARM = "nni_sdk.objective"


@dataclass(frozen=True, slots=True)
class ObjectiveFunction:
    """A function for trials. `name` is "module:name", for people too if it is pickled.

    `path` and `cwd` are those of this process. `modules` are installed modules that the function uses.
    """

    name: str
    pickled: bytes | None
    path: tuple[str, ...]
    cwd: Path
    modules: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[[dict[str, Any]], Any]) -> ObjectiveFunction:
        """The objective that calls `function` with the parameters of a trial, and reports what it returns.

        Raises:
            UserError: this is no function, it is asynchronous, or it can neither be imported nor pickled.
        """
        if not callable(function):
            raise UserError(
                f"cannot use {function!r} as the objective: it is not callable; pass a function of the parameters"
            )
        cwd = Path.cwd()
        path = tuple(os.path.abspath(each) for each in sys.path)
        module = _module_of(function)
        name = f"{module}:{getattr(function, '__qualname__', type(function).__qualname__)}"
        if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
            raise UserError(
                f"cannot use {name} as the objective: it is asynchronous, so a call returns a coroutine and no result; pass a "
                "function that runs it: lambda parameters: asyncio.run(FUNCTION(parameters))"
            )
        if _is_importable(name, function):
            names = vars(sys.modules[module])
            used = [names[each] for each in names if not each.startswith("__")]
            return cls(name, None, path, cwd, _installed(used))
        return cls(
            name, _pickled(function, name), path, cwd, ("cloudpickle", *_installed(_used_by(function)))
        )

    def applied_to(self, config: ExperimentConfig) -> ExperimentConfig:
        """The configuration of an experiment whose trials run the function, with `reuse_mode` on unless it is set.

        Raises:
            UserError: the configuration has a command, annotated code or another platform.
        """
        service = config.training_service
        if not isinstance(service, LocalConfig):
            raise UserError(
                f"cannot run the function {self.name} on {service.platform}: its processes run on this machine; use "
                "Experiment('local'), or write config.trial_command"
            )
        for field, value in (
            ("trial_command", config.trial_command or service.trial_command),
            ("use_annotation", config.use_annotation),
        ):
            if value:
                raise UserError(
                    f"cannot use {field} = {value!r} together with an objective: trials run the function "
                    f"{self.name}; remove one of both"
                )
        copied = copy.deepcopy(config)
        # `stored` adds the script, which does not exist yet, to the command; it usually replaces the folder.
        copied.trial_command, copied.trial_code_directory = shlex.quote(sys.executable), self.cwd
        copied.training_service.trial_code_directory = None
        if service.reuse_mode is not False:
            copied.training_service.reuse_mode = True
            given = config.warm_imports or ()
            if not isinstance(given, str):  # refused by the check of the configuration
                copied.warm_imports = [*dict.fromkeys((_WARM, *self.modules, *given))]
        return copied

    def stored(self, spec: ExperimentSpec, folder: ExperimentFolder) -> ExperimentSpec:
        """Write what trials need into the experiment's folder, and return the experiment whose trials run it."""
        folder.objective.mkdir(mode=0o700, exist_ok=True)
        description = {
            "function": None if self.pickled is not None else self.name,
            "path": self.path,
            "cwd": str(self.cwd),
        }
        contents = {
            _SCRIPT: _CODE.format(folder=str(folder.objective)).encode(),
            DESCRIPTION: json.dumps(description).encode(),
        }
        if self.pickled is None:
            (folder.objective / PICKLE).unlink(missing_ok=True)
        else:
            contents[PICKLE] = self.pickled
        for name, content in contents.items():
            replace_file(folder.objective / name, content, 0o600)
        return spec.replace(
            objective=self.name,
            trial_command=shlex.join([sys.executable, str(folder.objective / _SCRIPT)]),
            # Archives contain the code folder on request: never that of a script whose function they do not need.
            code_dir=self.cwd if self._is_importable_from_cwd() else folder.objective,
        )

    def store_again(self, known: KnownExperiment) -> None:
        """Let the later trials of a stored experiment, which does not run, call this function.

        Raises:
            UserError: its trials run a command, or another process has just become its owner.
            RetryableError: the database cannot be written now.
        """
        spec = known.stored.config()
        if not spec.objective:
            raise UserError(
                f"cannot resume experiment {known.experiment_id} with the function {self.name}: its trials run the "
                f"command {spec.trial_command}; omit objective"
            )

        def with_function(spec: ExperimentSpec) -> ExperimentSpec:
            spec = self.stored(spec, known.folder)
            if not spec.reuse_mode:
                return spec
            return spec.replace(warm_imports=[*dict.fromkeys((_WARM, *self.modules, *spec.warm_imports))])

        stored_config.change(known, with_function)

    def _is_importable_from_cwd(self) -> bool:
        if self.pickled is not None:
            return False
        top = self.name.partition(":")[0].partition(".")[0]
        return (self.cwd / f"{top}.py").is_file() or (self.cwd / top).is_dir()


def _is_importable(name: str, function: object) -> bool:
    """True if another process that imports the name gets this function."""
    module = name.partition(":")[0]
    if module == "__main__" or "<" in name or getattr(sys.modules.get(module), "__spec__", None) is None:
        return False
    with suppress(ImportError, AttributeError, ValueError):
        return importlib.util.find_spec(module) is not None and imported(name) is function
    return False


def _pickled(function: object, name: str) -> bytes:
    import cloudpickle  # few experiments need it

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, each: object) -> Any:
            if isinstance(each, CodeType):
                with suppress(ValueError):  # a constant that no compiler creates
                    # As in a .pyc file. cloudpickle replaces the name of the file, which tracebacks need.
                    return marshal.loads, (marshal.dumps(each),)
            return super().reducer_override(each)

    copied = io.BytesIO()
    try:
        Pickler(copied).dump(function)
    except Exception as error:  # objects raise what they like
        raise UserError(
            f"cannot copy the function {name} for the processes of trials: {error}; create what it uses inside the function, "
            "or move the function to a module"
        ) from error
    return copied.getvalue()


def _used_by(function: object) -> Iterator[object]:
    """The objects that a function uses by global names and closures, also through other functions of its module."""
    seen, left = set[int](), [function]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if not inspect.isfunction(each):
            continue
        names = each.__globals__
        left += [names[name] for name in _names_in(each.__code__) if name in names]
        for cell in each.__closure__ or ():
            with suppress(ValueError):  # the cell is empty
                left.append(cell.cell_contents)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _installed(objects: Any) -> tuple[str, ...]:
    """The installed modules among the objects, and those of the objects, in order."""
    paths = sysconfig.get_paths()
    folders = tuple(f"{paths[name]}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    found: dict[str, None] = {}
    for each in list(objects):
        name = each.__name__ if isinstance(each, ModuleType) else _module_of(each)
        module = sys.modules.get(name)
        if name != "__main__" and (getattr(module, "__file__", None) or "").startswith(folders):
            found[name] = None
    return tuple(found)


def _module_of(each: object) -> str:
    name = None
    with suppress(Exception):  # any object of the user
        name = each.__module__
    return name if isinstance(name, str) else type(each).__module__
