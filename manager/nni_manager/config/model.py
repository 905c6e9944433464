"""The checked configuration of an experiment: frozen, with absolute paths, independent of the schema of the file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from nni_manager.config.cluster import ClusterConfig, UnreadSection, as_json, validated
from nni_manager.config.platforms import PlatformUnusable, of_stored, stored_sections
from nni_manager.config.search_space import SearchSpace, parse_search_space
from nni_manager.domain.objectives import Constraint, Objective, Objectives, OptimizeMode, single
from nni_manager.errors import InternalError


@dataclass(frozen=True, slots=True)
class Expansion:
    """A path of the file and its absolute form; nnictl prints both, as NNI does."""

    key: str
    written: str
    absolute: Path


# Fitting a model to thousands of results takes minutes; a longer call most likely hangs.
CALL_TIMEOUT_S = 600.0
# As many trials fail in a minute, and a script that is wrong fails in each of them.
FAIL_FAST = 10


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


@dataclass(frozen=True, slots=True)
class LocalSpec:
    """GPU sharing of trials on this machine. `gpu_indices` None means all GPUs.

    `may_use_active_gpu` is stored and has no effect: trials also use GPUs that other processes use.
    """

    gpu_indices: tuple[int, ...] | None = None
    max_trials_per_gpu: int = 1
    may_use_active_gpu: bool = False


@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """Job reuse: a job runs many trials in sequence, and exits after `idle_timeout_s` without one.

    `max_trials` 0 means no limit. `warm_imports` are modules that the job imports before its trials start.
    """

    is_on: bool = False
    idle_timeout_s: float = 600.0
    max_trials: int = 0
    warm_imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExperimentSpec:
    """One checked experiment. Paths are absolute; `code_dir` was a folder when the file was read.

    `max_exec_duration_s`, `max_trial_number` and `max_trial_duration_s` None mean no limit. Limits and the search space
    can change after the file was read; `search_space_revision` counts the changes of the space. `search_space_raw` is the
    JSON of `search_space`. `gpu_num` None leaves a trial's CUDA_VISIBLE_DEVICES unchanged, 0 hides all GPUs. `nni_manager_ip`
    is the manager's address for keepers on other machines; None: the manager detects it. `trial_command` is empty if roles or
    a job file contain the commands. `cluster` None: trials run on this machine. `is_annotated`: `code_dir` has
    annotations, and trials run a generated copy; once the copy exists, `code_dir` is its path. `warnings` are for the user who
    starts the experiment. `schema` is that of the experiment file; a profile has its keys.
    """

    experiment_name: str
    author_name: str
    description: str | None
    trial_concurrency: int
    max_exec_duration_s: float | None
    max_trial_number: int | None
    training_service: str
    search_space: SearchSpace
    search_space_raw: dict[str, Any]
    tuner: TunerConfig
    trial_command: str
    code_dir: Path
    gpu_num: int | None
    nni_manager_ip: str | None
    log_dir: Path
    log_collection: Literal["none", "http"]
    log_level: Literal["trace", "debug", "info", "warning", "error", "fatal"]
    debug: bool
    version_check: bool
    local: LocalSpec
    reuse: ReuseConfig
    config_path: Path
    expansions: tuple[Expansion, ...] = ()
    cluster: ClusterConfig | None = None
    assessor: AssessorConfig | None = None
    is_annotated: bool = False
    warnings: tuple[str, ...] = ()
    max_trial_duration_s: float | None = None
    max_trial_retry: int = 0
    max_preemptions: int = 100
    initial_trials: tuple[dict[str, Any], ...] = ()
    """The parameters of the first trials, before the tuner proposes any."""
    warm_start: tuple[PriorPoint, ...] = ()
    """The first trials after these. Chosen when the experiment is created, so that a resume does not choose again."""
    fail_fast: int = FAIL_FAST
    """How many trials may fail, before any has succeeded, until no more are started; 0: all of them."""
    search_space_revision: int = 0
    schema: Literal["v1", "v2"] = "v1"
    objective: str = ""
    """The name of the function that trials run, "module:name"; empty: they run a command."""
    objectives: tuple[Objective, ...] = ()
    """As in the file; empty: it names none, see `all_objectives`."""
    constraints: tuple[Constraint, ...] = ()

    @property
    def all_objectives(self) -> Objectives:
        """The objectives and constraints; without any in the file, the number that trials report, by the tuner's mode."""
        return Objectives(self.objectives or single(self.tuner.optimize_mode).all, self.constraints)

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The files of the experiment that may contain a login or other secrets."""
        return () if self.cluster is None else (self.config_path, *self.cluster.secret_files)

    def without_secrets(self) -> ExperimentSpec:
        """A copy for display, without logins and the text of job descriptions; file names stay."""
        cluster = None if self.cluster is None else self.cluster.without_secrets()
        return dataclasses.replace(self, cluster=cluster)

    def to_json(self) -> str:
        """The experiment as JSON text; `from_json` restores an equal object."""
        fields: dict[str, Any] = {}
        section = of_stored(self.training_service).stored_as
        assert (section is None) == (self.cluster is None), self.training_service
        for name, value in as_json(self).items():
            if self.cluster is not None and section is not None and name == self.cluster.stored_before:
                fields[section] = self.cluster
            fields[name] = value
        del fields["search_space"], fields["cluster"]
        for absent in sorted(stored_sections() - fields.keys(), reverse=True):
            fields[absent] = None
        return json.dumps(fields, default=as_json)

    @classmethod
    def from_json(cls, text: str) -> ExperimentSpec:
        """The experiment that `to_json` wrote. Paths are not checked again.

        Raises:
            InternalError: `to_json` did not write this text.
        """
        try:
            fields = json.loads(text)
            fields["cluster"] = _stored_cluster(fields)
            fields.setdefault("reuse", ReuseConfig())  # absent in the first format of the store
            fields["search_space"] = parse_search_space(
                fields["search_space_raw"], for_own_class=fields["tuner"].get("own") is not None
            )
            spec: ExperimentSpec = validated(cls, fields)
        except ValidationError as error:
            raise _unreadable(error) from None  # the text of the cause contains values, such as logins
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InternalError(
                f"cannot read the stored experiment: {error!r}; please report this error"
            ) from error
        return spec


def _stored_cluster(fields: dict[str, Any]) -> ClusterConfig | None:
    """The section of the platform, which is taken out of the stored fields; None if trials run on this machine."""
    row = of_stored(fields["training_service"])
    stored = {
        name: fields.pop(name, None) for name in {*stored_sections(), row.stored_as} if name is not None
    }
    if row.stored_as is None:
        return None
    if row.is_absent and stored[row.stored_as] is None:
        raise ValueError(f"{row.name!r} is not a platform")
    try:
        section: type[ClusterConfig] = row.load("SECTION")
    except PlatformUnusable:
        return UnreadSection(stored[row.stored_as])
    try:
        return section.of_stored(stored[row.stored_as])
    except ValidationError as error:
        raise _unreadable(error, row.stored_as) from None


def _unreadable(error: ValidationError, *above: str) -> InternalError:
    wrong = [f"{'.'.join(map(str, (*above, *each['loc'])))}: {each['msg']}" for each in error.errors()]
    return InternalError(f"cannot read the stored experiment: {', '.join(wrong)}; please report this error")
