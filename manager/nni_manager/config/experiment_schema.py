"""The schema of experiment files, in the terms of NNI's second schema. `v1` names the keys of the first (`dialect.py`).

Source: NNI v2.10, nni/experiment/config; NNI v1.9 and v2.0, ExperimentConfig reference and nnictl's schema.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema, field_validator

from nni_manager.config.algorithms import reason_against
from nni_manager.config.platforms import PLATFORMS
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
from nni_manager.config.shared_keys import Duration, SharedKeys, duration
from nni_manager.config.units import megabytes


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

IMAGE = "registry.example.com/me/train:1"
COMMAND = "run by bash in the code folder"


def size(
    example: str,
    default: Any = ...,
    *,
    what: str = "a whole number of MB, or a size such as 8gb",
    **rules: Any,
) -> Any:
    """A field that must be a `Size`."""
    return must_be(what, example, default, kind="size", **rules)


def gpus(**rules: Any) -> Any:
    """A field that must be GPU numbers."""
    return must_be("GPU numbers separated by commas", '"0,1"', None, kind="gpus", **rules)


def keeper_source() -> Any:
    """A field that must be a `KeeperSource`."""
    return must_be("one of auto, image, bundle", "auto", "auto", since="0.7",
        about="where the keeper of a container is: in the image, in [the bundle](images.md#images-without-a-keeper), or `auto`:"
        " in the bundle if the image has none of this version")  # fmt: skip


def _folder(example: str, default: Any = ..., **rules: Any) -> Any:
    return text("a folder", example, default, kind="folder", **rules)


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
    """A built-in tuner, assessor or advisor by its name, or your own class.

    The reader reports missing keys of either.
    """

    python_name = "AlgorithmConfig"
    # fmt: off
    code_directory: str | None = _folder(".", None, v1="codeDir",
        about="the folder of [your own class](tuners.md#a-tuner-of-your-own)")
    class_file_name: str | None = must_be("the name of a Python file", "my_tuner.py", None, pattern=r"\.py$", only_v1=True,
        about="the file of your own class, in `codeDir`")
    class_name: str | None = must_be("the name of a class", "MyTuner", None, pattern=r"^\w+(\.\w+)*$",
        about="your own class; in the second schema and in Python, module and class: `my_tuner.MyTuner`")
    # Checked by the schema of the algorithm once the name is known.
    class_args: dict[str, Any] | None = mapping("{optimize_mode: maximize}", None, kind="open",
        about="the arguments of the algorithm")
    call_timeout: Duration = duration("10m", since="0.6", unset="`10m`",
        about="the maximum duration of one call of your own class")
    # fmt: on


class TunerKeys(_AlgorithmKeys):
    """`tuner`."""

    # fmt: off
    name: Annotated[str | None, _available("tuner")] = must_be("the name of a tuner", "TPE", None, v1="builtinTunerName",
        unset="`Auto`, unless it is your own", about="a built-in [tuner](tuners.md), or one that you have registered")
    include_intermediate_results: bool = flag("false", False, since="0.6",
        about="if an assessor or `maxTrialDuration` stops a trial before a final result, its last intermediate result is its "
        "result to the tuner; without it, see [assessors](assessors.md#rules-for-all-assessors)")
    # fmt: on


class AdvisorKeys(_AlgorithmKeys):
    """`advisor`: NNI's name for an algorithm that replaces both tuner and assessor."""

    # fmt: off
    name: Annotated[str | None, _available("advisor")] = must_be("the name of an advisor", "Hyperband", None,
        v1="builtinAdvisorName", unset="required, unless it is your own", about="a built-in advisor: `Hyperband` or `BOHB`")
    gpu_indices: GpuIndices = gpus(only_v1=True, about="accepted, without effect")
    # fmt: on


class AssessorKeys(_AlgorithmKeys):
    """`assessor`."""

    # fmt: off
    name: Annotated[str | None, _available("assessor")] = must_be("the name of an assessor", "Medianstop", None,
        v1="builtinAssessorName", unset="required, unless it is your own",
        about="a built-in [assessor](assessors.md), which stops trials early")
    # fmt: on


_WHERE = "where trials run: " + ", ".join(
    f"`{row.name}` is {row.title}" + (f" (`{row.v1}` in the first schema)" if row.v1 != row.name else "")
    for row in PLATFORMS.values()
)


class ServiceKeys(Schema):
    """The training service that runs trials. Trial fields set here take precedence over those of the experiment."""

    python_name = "TrainingServiceConfig"
    # fmt: off
    platform: str = must_be("a platform", "local", v1="/trainingServicePlatform", about=_WHERE)
    reuse_mode: bool = flag("true", False, v1="reuse", unset="`false`; in the second schema `true` on a cluster",
        about="a job runs many trials in sequence, see [reuse](reuse.md)")
    # fmt: on


class ExperimentKeys(SharedKeys):
    """The keys of a file that all platforms share. Paths are as written."""

    # fmt: off
    experiment_type: Literal["hpo"] | None = must_be("hpo", "hpo", None, v1="",
        about="`hpo`, hyper-parameter optimization, is the only supported type")
    search_space_file: str | None = line("the path of a JSON file", "search_space.json", None, kind="file",
        v1="searchSpacePath",
        unset="required, except for annotated code and [a tuner of your own](tuners.md#a-tuner-of-your-own)",
        about="a JSON file, or a YAML file (`.yml`, `.yaml`), see [search space](search-space.md)")
    # The reader checks the search space.
    search_space: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})] = must_be(
        "a mapping of hyper-parameters", "{}", None, kind="open", v1="", unset="see `searchSpaceFile`",
        about="the [search space](search-space.md) itself")
    use_annotation: bool = flag("false", False, about="the search space is that of the [annotations](annotations.md) in the "
        "code folder; if they name no hyper-parameter, that of the file is used")
    multi_phase: bool = flag("false", False, only_v1=True, about="only `false`: NNI removed it")
    multi_thread: bool = flag("false", False, only_v1=True, about="only `false`: NNI removed it")
    experiment_working_directory: str = _folder("~/nni-experiments", "", v1="logDir", unset="`~/nni-experiments`",
        about="the folder for the experiment's data")
    tuner: TunerKeys | None = mapping("{name: TPE, classArgs: {optimize_mode: maximize}}", None,
        unset="[`Auto`](tuners.md#auto)", about="the algorithm that proposes parameters")
    tuner_gpu_indices: GpuIndices = gpus(v1="tuner.gpuIndices", about="accepted, without effect on these tuners")
    assessor: AssessorKeys | None = mapping("{name: Medianstop}", None, about="the algorithm that stops trials early")
    advisor: AdvisorKeys | None = mapping("{name: Hyperband}", None, about="an algorithm that replaces both tuner and assessor")
    trial_code_directory: str = _folder(".", v1="trial.codeDir", unset="required; in the second schema `.`",
        about="the folder with the training code")
    # Each platform has its own `trainingService`.
    trial_command: str | None = text("a shell command", "python3 train.py", None, v1="trial.command",
        unset="required, unless a job file has it", about=COMMAND)
    trial_gpu_number: int | None = whole(0, 99999, "0", None, v1="trial.gpuNum", unset="the trial sees what the machine shows",
        about="GPUs per trial; `0` hides all GPUs from a trial")
    training_service: ServiceKeys = mapping("{platform: local}", about="the platform that runs trials, and its keys")
    # fmt: on

    @field_validator("experiment_type", mode="before")
    @classmethod
    def _is_search(cls, kind: Any) -> Any:
        # NNI v3 writes hpo; the other value is architecture search.
        if kind not in ("hpo", None):
            raise refusal("architecture search is not supported; write hpo, or remove it")
        return kind

    @field_validator("multi_phase", "multi_thread")
    @classmethod
    def _is_off(cls, asked: bool) -> bool:
        if asked:
            raise refusal("true: NNI deprecated it, and it is not supported; remove the key")
        return asked
