"""The schema of experiment files, in the terms of NNI's second schema. `v1` names the keys of the first (`dialect.py`).

Source: NNI v2.10, nni/experiment/config; NNI v1.9 and v2.0, ExperimentConfig reference and nnictl's schema.
"""

from __future__ import annotations

import ipaddress
import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema, field_validator, model_validator

from nni_manager.config.algorithms import reason_against
from nni_manager.config.diagnostics import shown
from nni_manager.config.model import FAIL_FAST
from nni_manager.config.schema import (
    Schema,
    flag,
    is_placeholder,
    line,
    mapping,
    must_be,
    refusal,
    text,
    whole,
)
from nni_manager.config.units import duration_s, megabytes
from nni_manager.domain.objectives import OptimizeMode

_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I | re.A
)


def _gpu_indices(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(each, int | str) and not isinstance(each, bool) for each in listed):
        raise ValueError(value)
    parts = [part.strip() for each in listed for part in str(each).split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len({*map(int, parts)}) != len(parts):
        raise ValueError(value)
    return tuple(int(part) for part in parts)


GpuIndices = Annotated[
    tuple[int, ...] | None,
    PlainValidator(_gpu_indices),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*\d+\s*(,\s*\d+\s*)*$"},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "uniqueItems": True},
                {"type": "null"},
            ]
        }
    ),
]
Duration = Annotated[
    float | None,
    PlainValidator(duration_s),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": r"^[1-9][0-9]{0,8}[smhd]$"}, {"type": "null"}]}),
]
_MOST_FAILURES = 99_999


def _failures(value: Any) -> int:
    """The number of failures of `failFast`; 0: it is off."""
    if isinstance(value, bool):
        return FAIL_FAST if value else 0
    if not isinstance(value, int) or not 1 <= value <= _MOST_FAILURES:
        raise ValueError(value)
    return value


FailFast = Annotated[
    int,
    PlainValidator(_failures),
    WithJsonSchema(
        {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1, "maximum": _MOST_FAILURES}]}
    ),
]
_MAX_MB = 99_999_999


def _size(least_mb: int, value: Any) -> int:
    size_mb = megabytes(value)
    if not least_mb <= size_mb <= _MAX_MB:
        raise ValueError(value)
    return size_mb


def _size_schema(least_mb: int) -> WithJsonSchema:
    pattern = r"^\s*[0-9]{1,9}(\.[0-9]{1,6})?\s*[TGMKtgmk]?([Ii]?[Bb])?\s*$"
    number = {"type": "integer", "minimum": least_mb, "maximum": _MAX_MB}
    return WithJsonSchema({"anyOf": [number, {"type": "string", "pattern": pattern}]})


Size = Annotated[int, PlainValidator(partial(_size, 1)), _size_schema(1)]
SizeFrom100 = Annotated[int, PlainValidator(partial(_size, 100)), _size_schema(100)]
SIZE_FROM_100 = "a whole number of MB, at least 100, or a size such as 8gb"

IMAGE = "registry.example.com/me/train:1"
GPUS = "GPU numbers separated by commas"


def _duration(example: str, **rules: Any) -> Any:
    return must_be("a whole number and one of s, m, h, d", example, None, **rules)


def _available(kind: Literal["tuner", "advisor", "assessor"]) -> BeforeValidator:
    """Refuses the name of an algorithm that is not available."""

    def checked(name: Any) -> Any:
        if is_placeholder(name):
            raise ValueError(name)
        if name is not None and (reason := reason_against(kind, name)) is not None:
            raise refusal(reason)
        return name

    return BeforeValidator(checked)


class _AlgorithmKeys(Schema):
    """A built-in algorithm by name, or the user's own class. The reader reports missing keys of either."""

    code_directory: str | None = text("a folder", ".", None, v1="codeDir")
    class_file_name: str | None = must_be(
        "the name of a Python file", "my_tuner.py", None, pattern=r"\.py$", only_v1=True
    )
    class_name: str | None = must_be("the name of a class", "MyTuner", None, pattern=r"^\w+(\.\w+)*$")
    # Checked by the schema of the algorithm once the name is known.
    class_args: dict[str, Any] | None = mapping("{optimize_mode: maximize}", None)
    call_timeout: Duration = _duration("10m")


class TunerKeys(_AlgorithmKeys):
    """`tuner`."""

    name: Annotated[str | None, _available("tuner")] = must_be(
        "the name of a tuner", "TPE", None, v1="builtinTunerName"
    )
    include_intermediate_results: bool = flag("false", False)


class AdvisorKeys(_AlgorithmKeys):
    """`advisor`: NNI's name for an algorithm that replaces both tuner and assessor."""

    name: Annotated[str | None, _available("advisor")] = must_be(
        "the name of an advisor", "Hyperband", None, v1="builtinAdvisorName"
    )
    gpu_indices: GpuIndices = must_be(GPUS, '"0,1"', None, only_v1=True)


class AssessorKeys(_AlgorithmKeys):
    """`assessor`."""

    name: Annotated[str | None, _available("assessor")] = must_be(
        "the name of an assessor", "Medianstop", None, v1="builtinAssessorName"
    )


class ObjectiveKeys(Schema):
    """One of `objectives`: a metric of the final result."""

    metric: str = line("the name of a metric", "accuracy")
    mode: OptimizeMode = must_be("maximize or minimize", "maximize")


class ConstraintKeys(Schema):
    """One of `constraints`: bounds of a metric of the final result."""

    metric: str = line("the name of a metric", "size_mb")
    at_most: float | None = must_be("a number", "50", None, allow_inf_nan=False)
    at_least: float | None = must_be("a number", "1", None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _is_satisfiable(self) -> ConstraintKeys:
        if self.at_most is None and self.at_least is None:
            raise refusal(
                f"cannot use the constraint of {shown(self.metric)}: it has no bound; write at_most, at_least or both"
            )
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            raise refusal(
                f"cannot use the constraint of {shown(self.metric)}: at_least {self.at_least:g} is above at_most "
                f"{self.at_most:g}; swap them"
            )
        return self


class ServiceKeys(Schema):
    """The keys of `trainingService` that all platforms share."""

    platform: str = must_be("a platform", "local", v1="/trainingServicePlatform")
    reuse_mode: bool = flag("true", False, v1="reuse")


class ExperimentKeys(Schema):
    """The keys of a file that all platforms share. Paths are as written; durations are in seconds."""

    author_name: str = text("a name", "your name", only_v1=True)
    experiment_name: str = text("a name", "digits")
    experiment_type: Literal["hpo"] | None = must_be("hpo", "hpo", None, v1="")
    description: str | None = must_be("text", "what this searches for", None)
    trial_concurrency: int = whole(1, 99999, "2")
    max_experiment_duration: Duration = _duration("1h", v1="maxExecDuration")
    max_trial_number: int | None = whole(1, 99999, "20", None, v1="maxTrialNum")
    max_trial_duration: Duration = _duration("30m")
    max_trial_retry: int = whole(0, 99, "2", 0)
    # Each restart is on the cluster's word; the limit only ends a trial that a crowded cluster would never let finish.
    max_preemptions: int = whole(0, 9999, "100", 100)
    # NNI lacks this key: it starts every trial, however many fail.
    fail_fast: FailFast = must_be(f"false, or a whole number from 1 to {_MOST_FAILURES}", "10", FAIL_FAST)
    search_space_file: str | None = line(
        "the path of a JSON file", "search_space.json", None, v1="searchSpacePath"
    )
    # The reader checks the search space.
    search_space: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})] = must_be(
        "a mapping of hyper-parameters", "{}", None, v1=""
    )
    use_annotation: bool = flag("false", False)
    multi_phase: bool = flag("false", False, only_v1=True)
    multi_thread: bool = flag("false", False, only_v1=True)
    nni_manager_ip: str | None = must_be("an IPv4 address or a host name", "10.0.0.1", None)
    experiment_working_directory: str = text("a folder", "~/nni-experiments", "", v1="logDir")
    debug: bool = flag("false", False)
    version_check: bool | None = flag("true", None)
    log_level: Literal["trace", "debug", "info", "warning", "error", "fatal"] = must_be(
        "one of trace, debug, info, warning, error, fatal", "info", "info"
    )
    log_collection: Literal["none", "http"] = must_be("none or http", "none", "none")
    tuner: TunerKeys | None = mapping("{name: TPE, classArgs: {optimize_mode: maximize}}", None)
    # No effect: the tuners of this version do not use GPUs.
    tuner_gpu_indices: GpuIndices = must_be(GPUS, '"0,1"', None, v1="tuner.gpuIndices")
    assessor: AssessorKeys | None = mapping("{name: Medianstop}", None)
    advisor: AdvisorKeys | None = mapping("{name: Hyperband}", None)
    # NNI lacks these three keys: a reused job always exits after 600 idle seconds.
    reuse_idle_timeout: Duration = _duration("10m")
    max_trials_per_job: int = whole(0, 999999999, "0", 0)
    warm_imports: list[str] = must_be("a list of module names", "[numpy, sklearn]", [])
    # NNI lacks this key, too: parameters that a person knows to be good.
    initial_trials: list[dict[str, Any]] = must_be("a list of parameters of trials", "[{lr: 0.1}]", [])
    # NNI lacks these keys, too: its trials have one number, `default`.
    objectives: list[ObjectiveKeys] = must_be(
        "a list of objectives", "[{metric: accuracy, mode: maximize}]", []
    )
    constraints: list[ConstraintKeys] = must_be(
        "a list of constraints", "[{metric: size_mb, at_most: 50}]", []
    )
    trial_code_directory: str = text("a folder", ".", v1="trial.codeDir")
    # Each platform has its own `trainingService`.
    trial_command: str | None = text("a shell command", "python3 train.py", None, v1="trial.command")
    trial_gpu_number: int | None = whole(0, 99999, "0", None, v1="trial.gpuNum")
    training_service: ServiceKeys = mapping("{platform: local}")

    @field_validator("experiment_type", mode="before")
    @classmethod
    def _is_search(cls, kind: Any) -> Any:
        # NNI v3 writes hpo; the other value is architecture search.
        if kind not in ("hpo", None):
            raise refusal("architecture search is not supported; write hpo, or remove it")
        return kind

    @field_validator("nni_manager_ip")
    @classmethod
    def _is_reachable(cls, text: str | None) -> str | None:
        if text is None:
            return None
        # A last label of digits means an address, which must be valid; anything else must be a valid DNS name.
        if not _HOST_NAME.fullmatch(text) or text.rpartition(".")[2].isdigit():
            return str(ipaddress.IPv4Address(text))
        return text

    @field_validator("warm_imports")
    @classmethod
    def _are_modules(cls, names: list[str]) -> list[str]:
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise refusal(f"{shown(name)} is not the name of a module; write names as after `import`")
        return names

    @field_validator("multi_phase", "multi_thread")
    @classmethod
    def _is_off(cls, asked: bool) -> bool:
        if asked:
            raise refusal("true: NNI deprecated it, and it is not supported; remove the key")
        return asked
