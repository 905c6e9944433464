"""The configuration of an experiment in Python: NNI's classes, with the keys of the second schema of experiment files as fields.

The fields are those of `sections.py`, which is generated from the declarations of the keys. `nni_manager.config` checks the
values. A field that is None is not set; it has the default of the experiment file.

Source: NNI v2.10 and v3.0, nni.experiment.config.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic.alias_generators import to_snake

from nni_manager.client import output
from nni_manager.config.convert import read_keys
from nni_manager.config.diagnostics import ConfigInvalid, Diagnostic, folded, leaves
from nni_manager.config.model import ExperimentSpec as CheckedConfig
from nni_manager.config.platforms import NAMES
from nni_manager.config.python_document import read_python
from nni_manager.errors import UserError
from nni_manager.experiment.aliases import AliasHint, PathOrText

# NNI's scripts import these classes from this module.
from nni_manager.experiment.sections import *  # noqa: F403
from nni_manager.experiment.sections import (
    AlgorithmConfig,
    ExperimentFields,
    K8sStorageConfig,
    TrainingServiceConfig,
)
from nni_sdk.nesting import TOO_DEEP

# The folder of the training code: of all trials, of a training service, or of a role.
_OF_CODE = ("trialcodedirectory", "codedirectory")
_ALGORITHMS = ("tuner", "assessor", "advisor")


@dataclass(kw_only=True)
class CustomAlgorithmConfig(AlgorithmConfig):
    """Your own tuner or assessor: `class_name` is module and class, in the folder `code_directory`."""

    code_directory: PathOrText | None = "."


@dataclass(kw_only=True)
class K8sNfsConfig(K8sStorageConfig):
    """An export of an NFS server: `server` and `path`."""

    storage_type: str | None = "nfs"


@dataclass(kw_only=True)
class K8sAzureStorageConfig(K8sStorageConfig):
    """An Azure file share: `azure_account` and `azure_share`. Its key is in a vault: `key_vault_name`, `key_vault_key`."""

    storage_type: str | None = "azureStorage"


@dataclass(kw_only=True)
class K8sPvcConfig(K8sStorageConfig):
    """A PersistentVolumeClaim: `claim_name`, and `path`, the mount point of its volume on this machine."""

    storage_type: str | None = "pvc"


@dataclass
class ExperimentConfig(ExperimentFields):
    """A whole experiment. `ExperimentConfig("local")` runs on this machine; all other fields are unset.

    >>> config = ExperimentConfig("local")
    >>> config.tuner.name = "Random"
    >>> config.trial_concurrency = 2
    >>> config.document()
    {'trialConcurrency': 2, 'tuner': {'name': 'Random'}, 'trainingService': {'platform': 'local'}}
    """

    answers: ClassVar[Mapping[str, str]] = {
        "name": "did you mean experiment_name?",
        "author_name": "an experiment in Python has no author; remove it",
    }
    training_service_platform: InitVar[str | None] = None
    _: KW_ONLY
    shared_storage: dict[str, Any] | None = None
    """NNI's storage for all platforms. Not supported: storage belongs to the training service."""

    def __post_init__(self, training_service_platform: str | None) -> None:
        """Create the training service of the platform.

        Raises:
            PlatformUnknown: the platform is unknown.
            UserError: `training_service` is that of another platform.
        """
        if training_service_platform is None:
            return
        made = TrainingServiceConfig.for_platform(training_service_platform)()
        if self.training_service == TrainingServiceConfig():
            self.training_service = made
        elif getattr(self.training_service, "platform", None) != made.platform:
            raise UserError(
                f"cannot use the platform {training_service_platform!r} together with training_service = "
                f"{self.training_service!r}: that is another platform's; remove one of both"
            )

    @classmethod
    def load(cls, path: PathOrText) -> ExperimentConfig:
        """The configuration in an experiment file, in either of NNI's schemas. Relative paths are those of the file.

        Raises:
            ConfigInvalid: the file cannot be read, or has errors in NNI's first schema.
            NoSuchField: a key of the second schema is unknown.
        """
        file = Path(path)
        keys = read_keys(file)
        key_paths = (key_path for key_path, _ in leaves(keys) if folded(str(key_path[0])) not in _ALGORITHMS)
        if not any(
            isinstance(key, str) and folded(key) in _OF_CODE for key_path in key_paths for key in key_path
        ):
            keys["trialCodeDirectory"] = str(file.absolute().parent)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AliasHint)  # keys of files are in camelCase
            return cls(**keys)

    def canonical_copy(self) -> ExperimentConfig:
        """A copy with absolute paths, the search space in place of its file, and the defaults of top-level fields.

        Raises:
            ConfigInvalid: with every error.
        """
        checked, copied = self.checked(), copy.deepcopy(self)
        copied.search_space = None if checked.is_annotated else checked.search_space_raw
        copied.search_space_file = None
        copied.experiment_name = checked.experiment_name
        copied.trial_code_directory = str(checked.code_dir)
        copied.experiment_working_directory = str(checked.log_dir)
        copied.use_annotation, copied.debug = checked.is_annotated, checked.debug
        copied.log_level = checked.log_level
        return copied

    def json(self) -> dict[str, Any]:
        """The canonical copy as a document of the second schema, for JSON.

        Raises:
            ConfigInvalid: with every error.
        """
        return self.canonical_copy().document()

    def checked(self) -> CheckedConfig:
        """The checked experiment, ready to run.

        Raises:
            ConfigInvalid: with every error; each names its field.
            UserError: the current directory was deleted.
        """
        check_current_directory()
        try:
            described = self.document()
        except RecursionError as error:
            message = f"cannot use config: it contains itself or is {TOO_DEEP}; remove the circular reference, or make it flatter"
            raise ConfigInvalid([Diagnostic("", None, None, "config", message)]) from error
        return read_python(described, _name_of_program())

    def warn_of_changes_since(self, start: Mapping[str, Any]) -> None:
        """Warn of fields that differ from the document with which an experiment was started: it does not see them."""
        now = self.document()
        if changed := sorted(to_snake(name) for name in {*now, *start} if now.get(name) != start.get(name)):
            output.warning(
                f"config.{', config.'.join(changed)} changed after the start, without effect; call an update_...() method, or "
                "start another experiment"
            )

    def validate(self) -> None:
        """Check the configuration without starting anything.

        Raises:
            ConfigInvalid: with every error.
        """
        self.checked()


# For help(): what the fields are for.
ExperimentConfig.__doc__ = "".join(
    (ExperimentConfig.__doc__ or "", *(ExperimentFields.__doc__ or "").partition("\n")[1:])
)


def check_current_directory() -> None:
    """Check that the current directory exists: relative paths are relative to it.

    Raises:
        UserError: it was deleted.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError(
            "cannot use the current directory: it was deleted; change to another one with os.chdir()"
        ) from None


def _name_of_program() -> str:
    """The default experiment name: that of the program, or "experiment" in a notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file).stem if file else "experiment"


class UnsupportedName(UserError, ImportError):
    """cannot import this name of nni.experiment: it configures an unsupported platform or storage"""


_PLATFORMS = f"this platform is not supported; use {NAMES}"
_UNSUPPORTED = dict.fromkeys(
    ("AmlConfig", "DlcConfig", "AdlConfig", "PaiYarnConfig"),
    _PLATFORMS,
) | dict.fromkeys(
    ("SharedStorageConfig", "NfsConfig", "AzureBlobConfig", "AzureStorageConfig"),
    "shared storage belongs to the training service; on Kubernetes use K8sNfsConfig, K8sPvcConfig or K8sAzureStorageConfig",
)


def unsupported(module: str, name: str) -> Any:
    """Refuse a name that a module of the Python API lacks.

    Raises:
        UnsupportedName: NNI has it, for a platform or a storage that is not supported.
        AttributeError: NNI has it neither.
    """
    if name in _UNSUPPORTED:
        raise UnsupportedName(f"cannot import {name}: {_UNSUPPORTED[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    return unsupported(__name__, name)
