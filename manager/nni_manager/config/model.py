"""The checked configuration of an experiment: frozen, with absolute paths, independent of the schema of the file.

The keys that the engine reads as they are written are those of `shared_keys.py`; the fields here are resolved from others.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError

from nni_manager.config.cluster import ClusterConfig, UnreadSection, as_json
from nni_manager.config.platforms import PlatformUnusable, of_stored, stored_sections
from nni_manager.config.search_space import SearchSpace, parse_search_space
from nni_manager.config.shared_keys import STORED, SharedKeys
from nni_manager.domain.objectives import Constraint, Objective, Objectives, OptimizeMode, single
from nni_manager.errors import InternalError
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Expansion:
    """A path of the file and its absolute form; nnictl prints both, as NNI does."""

    key: str
    written: str
    absolute: Path


# Fitting a model to thousands of results takes minutes; a longer call most likely hangs.
CALL_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class UserClass:
    """A class of the user. `class_name` and `validator` are dotted: module and class.

    `code_dir` is the folder of the module; None: the module is installed. `call_timeout_s` limits each call of the class.
    `is_advisor`: the class is both tuner and assessor.
    """

    class_name: str
    code_dir: str | None = None
    validator: str | None = None
    call_timeout_s: float = CALL_TIMEOUT_S
    is_advisor: bool = False


@dataclass(frozen=True, slots=True)
class TunerConfig:
    """The tuner. `class_args` is as written in the file; checked values are in the other fields.

    `seed` None: each experiment draws its own seed. `include_intermediate_results`: the tuner receives the last intermediate
    result of an early-stopped trial as its final result. `own`: the user's class; None for a built-in tuner.
    """

    name: str
    optimize_mode: OptimizeMode
    seed: int | None
    class_args: dict[str, Any]
    include_intermediate_results: bool = False
    own: UserClass | None = None


@dataclass(frozen=True, slots=True)
class PriorPoint:
    """Parameters with which the search starts (`warmStart`), and their result. `source`: an experiment's id, or a file."""

    source: str
    parameters: dict[str, Any]
    value: float
    """That of the first objective."""


@dataclass(frozen=True, slots=True)
class AssessorConfig:
    """The assessor, which stops trials early. `class_args` is as written in the file, and checked. `own`: as for a tuner.

    `optimize_mode` None: that of `class_args`, or the tuner's, in experiments of version 0.6.
    """

    name: str
    class_args: dict[str, Any]
    own: UserClass | None = None
    optimize_mode: OptimizeMode | None = None


class ExperimentSpec(SharedKeys):
    """One checked experiment: the keys of its file, and what was resolved. Paths are absolute; `code_dir` was a folder then.

    Limits and the search space can change after the file was read; `search_space_revision` counts the changes of the space.
    `search_space_raw` is the JSON of `search_space`. `trial_command` is empty if roles or a job file contain the commands.
    `trial_gpu_number` None leaves a trial's CUDA_VISIBLE_DEVICES unchanged, 0 hides all GPUs.
    `cluster` is the section of the platform. `is_annotated`: `code_dir` has annotations, and trials run a generated copy; once
    the copy exists, `code_dir` is its path. `warnings` are for the user who starts the experiment. `file_schema` is that of the
    experiment file; a profile has its keys.
    """

    model_config = ConfigDict(strict=False, extra="ignore")
    training_service: str
    search_space: SearchSpace
    search_space_raw: dict[str, Any]
    tuner: TunerConfig
    trial_command: str
    trial_gpu_number: int | None
    code_dir: Path
    log_dir: Path
    cluster: ClusterConfig
    config_path: Path
    reuse_mode: bool = False
    expansions: tuple[Expansion, ...] = ()
    assessor: AssessorConfig | None = None
    is_annotated: bool = False
    warnings: tuple[str, ...] = ()
    warm_start: tuple[PriorPoint, ...] = ()
    """The first trials after `initial_trials`. Chosen when the experiment is created, so that a resume does not choose again."""
    search_space_revision: int = 0
    file_schema: Literal["v1", "v2"] = "v1"
    objective: str = ""
    """The name of the function that trials run, "module:name"; empty: they run a command."""

    @classmethod
    def of(cls, keys: SharedKeys, **resolved: Any) -> ExperimentSpec:
        """The experiment with the keys of a file and these fields, which are not checked again."""
        return cls.model_construct(
            **{name: getattr(keys, name) for name in SharedKeys.model_fields} | resolved
        )

    def replace(self, **changes: Any) -> ExperimentSpec:
        """A copy with other values of these fields, which are not checked."""
        assert changes.keys() <= type(self).model_fields.keys(), changes.keys()
        return self.model_copy(update=changes)

    @property
    def all_objectives(self) -> Objectives:
        """The objectives and constraints; without any in the file, the number that trials report, by the tuner's mode."""
        return Objectives(
            tuple(Objective(each.metric, each.mode) for each in self.objectives)
            or single(self.tuner.optimize_mode).all,
            tuple(Constraint(each.metric, each.at_most, each.at_least) for each in self.constraints),
        )

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The files of the experiment that may contain a login or other secrets."""
        return () if self.cluster.is_this_machine else (self.config_path, *self.cluster.secret_files)

    def without_secrets(self) -> ExperimentSpec:
        """A copy for display, without logins and the text of job descriptions; file names stay."""
        return self.replace(
            cluster=self.cluster.without_secrets(), notify=[each.without_secrets() for each in self.notify]
        )

    def to_json(self) -> str:
        """The experiment as JSON text; `from_json` restores an equal object."""
        fields: dict[str, Any] = {}
        for name, (*above, last) in _stored_places().items():
            section = fields
            for step in above:
                section = section.setdefault(step, {})
            section[last] = getattr(self, name)
        fields |= dict.fromkeys(sorted(stored_sections()))
        fields[of_stored(self.training_service).stored_as] = self.cluster
        return json.dumps(fields, default=as_json)

    @classmethod
    def from_json(cls, text: str) -> ExperimentSpec:
        """The experiment that `to_json` wrote. Paths are not checked again.

        Raises:
            InternalError: `to_json` did not write this text.
        """
        try:
            stored = json.loads(text)
            fields: dict[str, Any] = {"cluster": _stored_cluster(stored)}
            for name, (*above, last) in _stored_places().items():
                section = stored
                for step in above:
                    section = section.get(step, {})  # `reuse` is absent in the first format of the store
                if last in section:
                    fields[name] = section[last]
            fields["search_space"] = parse_search_space(
                fields["search_space_raw"], for_own_class=fields["tuner"].get("own") is not None
            )
            return cls.model_validate(fields, context=STORED)
        except ValidationError as error:
            raise _unreadable(error) from None  # the text of the cause contains values, such as logins
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InternalError(
                f"cannot read the stored experiment: {error!r}; please report this error"
            ) from error


# The places of fields in stored experiments that are not the fields' names. A key that is added has its own name.
_STORED_AT = {
    "max_experiment_duration": "max_exec_duration_s",
    "max_trial_duration": "max_trial_duration_s",
    "trial_gpu_number": "gpu_num",
    "reuse_mode": "reuse.is_on",
    "reuse_idle_timeout": "reuse.idle_timeout_s",
    "max_trials_per_job": "reuse.max_trials",
    "warm_imports": "reuse.warm_imports",
    "file_schema": "schema",
}


@cache
def _stored_places() -> dict[str, list[str]]:
    """The path of each field in a stored experiment."""
    names = ExperimentSpec.model_fields.keys() - {"search_space", "cluster"}
    return {
        name: _STORED_AT.get(name, name).split(".") for name in ExperimentSpec.model_fields if name in names
    }


def _stored_cluster(fields: dict[str, Any]) -> ClusterConfig:
    """The section of the platform."""
    row = of_stored(fields["training_service"])
    if row.is_absent and fields.get(row.stored_as) is None:
        raise ValueError(f"{row.name!r} is not a platform")
    try:
        section: type[ClusterConfig] = row.load("SECTION")
    except PlatformUnusable:
        return UnreadSection(fields[row.stored_as])
    try:
        return section.of_stored(fields[row.stored_as])
    except ValidationError as error:
        raise _unreadable(error, row.stored_as) from None


def _unreadable(error: ValidationError, *above: str) -> InternalError:
    wrong = [f"{'.'.join(map(str, (*above, *each['loc'])))}: {each['msg']}" for each in error.errors()]
    return InternalError(f"cannot read the stored experiment: {', '.join(wrong)}; please report this error")
