"""NNI's import names for code that was written for NNI: `nni` is this SDK, and `nni.experiment` the Python Experiment API.

Used where the real package is absent: in trials (`nni_sdk/fallback/nni`), in the processes of users' tuners, and in scripts of
the Python Experiment API. Source: NNI v2.10 and v3.0, the public modules.
"""

import sys

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# Each module by its full name: a module found through our package's path would be loaded twice, with separate classes.
_OF_ADVISORS = {
    "nni.msg_dispatcher_base": "nni_sdk.advisor",
    "nni.protocol": "nni_sdk.advisor",
    "nni.runtime.msg_dispatcher_base": "nni_sdk.advisor",
    "nni.runtime.protocol": "nni_sdk.advisor",
}
_OF_SDK = {
    "nni.assessor": "nni_sdk.assessor",
    "nni.recoverable": "nni_sdk.tuner",
    "nni.trial": "nni_sdk.trial",
    "nni.tuner": "nni_sdk.tuner",
    "nni.utils": "nni_sdk.utils",
    "nni.runtime.config": "nni_sdk.config_folder",
    "nni.runtime.tuner_command_channel": "nni_sdk.advisor",
}
_OF_MANAGER = {
    "nni.experiment": "nni_manager.experiment",
    "nni.experiment.config": "nni_manager.experiment.config",
    "nni.experiment.data": "nni_manager.experiment.data",
    "nni.experiment.experiment": "nni_manager.experiment.experiment",
}
_INSTALL_NNI = "install the package nni in this Python, which is then used instead"
_ABSENT = {
    "nni.algorithms": "tuners and assessors run in the manager; name one in the experiment file, or "
    + _INSTALL_NNI,
    "nni.common": _INSTALL_NNI,
    "nni.compression": "model compression is not a part of trial-keeper; " + _INSTALL_NNI,
    "nni.feature_engineering": "feature engineering is not a part of trial-keeper; " + _INSTALL_NNI,
    "nni.nas": "architecture search is not a part of trial-keeper; " + _INSTALL_NNI,
    "nni.retiarii": "architecture search is not a part of trial-keeper; " + _INSTALL_NNI,
    "nni.smartparam": "write annotations in the training code, and useAnnotation in the experiment file",
}
# Public names that NNI has and nni_sdk has not, by module, with the remedy where it is not to install NNI's package.
_ANNOTATIONS = _ABSENT["nni.smartparam"]
_ABSENT_NAMES = {
    "nni_sdk": {
        **dict.fromkeys(
            (
                "dispatcher_env_vars",
                "dump",
                "enable_global_logging",
                "get_default_framework",
                "load",
                "set_default_framework",
                "shortcut_framework",
                "shortcut_module",
                "silence_stdout",
                "trace",
                "training_update",
            ),
            _INSTALL_NNI,
        ),
        **dict.fromkeys(
            (
                "choice",
                "function_choice",
                "lognormal",
                "loguniform",
                "mutable_layer",
                "normal",
                "qlognormal",
                "qloguniform",
                "qnormal",
                "quniform",
                "randint",
                "uniform",
            ),
            _ANNOTATIONS,
        ),
    },
    "nni_sdk.trial": dict.fromkeys(
        (
            "ParameterRecord",
            "dump",
            "get_default_trial_command_channel",
            "get_next_parameters",
            "overwrite_intermediate_seq",
            "trial_env_vars",
        ),
        _INSTALL_NNI,
    ),
    "nni_sdk.tuner": {"TrialRecord": _INSTALL_NNI},
    "nni_sdk.utils": dict.fromkeys(("json2parameter", "json2space"), _INSTALL_NNI),
    "nni_sdk.config_folder": dict.fromkeys(("get_builtin_config_file", "get_config_file"), _INSTALL_NNI),
}


def install_import_aliases(*, experiment_is_ours: bool = False, advisors_are_ours: bool = False) -> None:
    """Make `import nni` import our SDK, unless the real package is installed.

    `experiment_is_ours`: `nni.experiment` is ours even then. `advisors_are_ours`: so is the base class of advisors.
    """
    try:
        __import__("nni")
    except ModuleNotFoundError as error:
        if error.name != "nni":
            raise
        use_sdk()
    else:
        names = dict(_OF_MANAGER if experiment_is_ours else {}, **(_OF_ADVISORS if advisors_are_ours else {}))
        if names:
            _install_finder(names)


def use_sdk() -> None:
    """Make `nni` this SDK in this process, without a search for the real package."""
    sys.modules["nni"] = sys.modules["nni_sdk"]
    _install_finder(dict(_OF_SDK, **_OF_ADVISORS, **_OF_MANAGER))


def _install_finder(names: "dict[str, str]") -> None:
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder(names))


class _Finder:
    """Finds the modules on demand: the import of some takes a second, and most code needs none."""

    def __init__(self, names: "dict[str, str]") -> None:
        self._names = names
        self._is_for_all = "nni.tuner" in names
        """False beside the real package, of which only some modules are ours."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The spec of a module of ours under NNI's name; None for any other module.

        Raises:
            ModuleNotFoundError: the real package has the module, and ours does not.
        """
        is_package = fullname == "nni.runtime" and self._is_for_all
        if is_package or fullname in self._names:
            from importlib.machinery import ModuleSpec

            loader: Any = _Alias(self._names.get(fullname))
            return ModuleSpec(fullname, loader, is_package=is_package)
        if not (self._is_for_all and fullname.startswith("nni.")):
            return None
        remedy = next(
            (_ABSENT[name] for name in _ABSENT if f"{fullname}.".startswith(f"{name}.")), _INSTALL_NNI
        )
        raise ModuleNotFoundError(
            f"cannot import {fullname}: nni is nni_sdk in this Python, which has no such module; {remedy}",
            name=fullname,
        )


class _Alias:
    """Replaces the imported module with a module of ours; without a name, leaves it an empty package."""

    def __init__(self, name: "str | None") -> None:
        self._name = name

    def create_module(self, spec: "ModuleSpec") -> None:
        """Let Python create a module, which `exec_module` replaces."""

    def exec_module(self, module: "ModuleType") -> None:
        """Import our module."""
        if self._name is not None:
            sys.modules[module.__name__] = _imported(self._name)


def attribute(name: str) -> object:
    """Return an attribute of NNI's package that nni_sdk imports only on demand: `experiment` or `Experiment`.

    Raises:
        ImportError: NNI has it and nni_sdk has not. In `from nni import trace`, an AttributeError would lose its text.
        AttributeError: NNI has none either.
    """
    if name in ("experiment", "Experiment"):
        module = experiment_module()
        return module if name == "experiment" else getattr(module, name)
    return absent("nni_sdk", name)


def absent(module: str, name: str) -> object:
    """Refuse a name that a module of nni_sdk has not.

    Raises:
        ImportError: NNI's module has the name; the message has the remedy.
        AttributeError: NNI's has it neither.
    """
    remedy = _ABSENT_NAMES[module].get(name)
    if remedy is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    theirs = module.replace("nni_sdk", "nni")
    raise ImportError(
        f"cannot find {theirs}.{name}: {theirs} is {module} in this Python, which has no {name}; "
        f"remove its use, or {remedy}"
    )


def experiment_module() -> "ModuleType":
    """Return the Python Experiment API.

    Raises:
        ModuleNotFoundError: this Python has no manager.
    """
    return _imported("nni_manager.experiment")


def _imported(name: str) -> "ModuleType":
    from importlib import import_module

    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # Not the module, but another one that it imports.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ModuleNotFoundError(
            f"cannot import {name}: experiments are a part of the manager, which this Python lacks; "
            "run `pip install 'trial-keeper[manager]'` in this Python",
            name=name,
        ) from error
