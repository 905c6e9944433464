"""Prior results of other experiments for a tuner (warm start), in the format of `nnictl experiment export`.

An export may have results without a finite number, such as null in place of NaN. The import skips them.

Source: NNI v2.0, nnictl experiment import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nni_manager.config.diagnostics import MAX_DIAGNOSTICS, ConfigInvalid, Diagnostic, key_of, shown
from nni_manager.config.search_space import Path, SearchSpace
from nni_manager.domain.objectives import MAXIMIZE, Objectives
from nni_manager.domain.provenance import PROVENANCE
from nni_sdk.nesting import TOO_DEEP, is_too_deep
from trial_keeper.frozen_dataclass import dataclass

_EXAMPLE = '[{"parameter": {"lr": 0.1}, "value": 0.93}]'
# Other keys of an export, with their names in later versions of NNI.
_IGNORED = ("trialJobId", "id", "tags", "note", "onFront", "intermediate", *PROVENANCE)


@dataclass(frozen=True, slots=True)
class PriorResult:
    """Parameters that the tuner did not propose, and their result. `value` is the number for the tuner, that of the first
    objective; None without one.

    `metric` is the whole reported result as JSON text.
    """

    parameters: Mapping[str, Any]
    value: float | None
    metric: str


def results_of(
    raw: Any, space: SearchSpace, tuner: str, objectives: Objectives = MAXIMIZE
) -> list[PriorResult]:
    """The results in a JSON document, without those that have no finite number.

    Raises:
        ConfigInvalid: with every error of the document, without file and line.
    """
    results, problems = read_results(raw, space, tuner, objectives)
    if problems:
        raise ConfigInvalid(Diagnostic("", None, None, key_of(path), message) for path, message in problems)
    return results


def read_results(
    raw: Any, space: SearchSpace, tuner: str, objectives: Objectives = MAXIMIZE
) -> tuple[list[PriorResult], list[tuple[Path, str]]]:
    """The results, and the errors with their paths in the document, up to MAX_DIAGNOSTICS.

    Results without a finite number are skipped; if no result has one, this is an error. If there is an error, no result may be
    used. `tuner`: the name of the tuner that receives them. `objectives`: what each result must have; by default a number.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        return [], [((), f"cannot import {shown(raw)}: it has no list of results; write {_EXAMPLE}")]
    results: list[PriorResult] = []
    problems: list[tuple[Path, str]] = []
    for index, entry in enumerate(raw):
        found, wrong = _read(entry, index, space, tuner, objectives)
        problems += wrong
        if found is not None:
            results.append(found)
        if len(problems) >= MAX_DIAGNOSTICS:
            break
    if not results and not problems:
        why = objectives.reason_against(_metric_of(raw[0]))
        remedy = "a number or a mapping with a number under default"
        if not objectives.is_plain:
            remedy = f"a mapping with a number under {', '.join(objectives.metrics)}"
        problems.append(
            (
                (0, "value"),
                f"cannot import: no result has a finite number, [0].value is {why}; write {remedy}",
            )
        )
    return results, problems[:MAX_DIAGNOSTICS]


def _metric_of(entry: Mapping[str, Any]) -> str:
    value = entry.get("value")
    return value if isinstance(value, str) else json.dumps(value)


def _read(
    entry: Any, index: int, space: SearchSpace, tuner: str, objectives: Objectives
) -> tuple[PriorResult | None, list[tuple[Path, str]]]:
    # Imported late: the store imports this module, and listing trials must not load all schemas.
    from nni_manager.config.algorithms import problems_within, without_added

    if not isinstance(entry, Mapping):
        return None, [
            ((index,), f"cannot import [{index}]: {shown(entry)} is not a result; write {_EXAMPLE}")
        ]
    problems: list[tuple[Path, str]] = []

    def refuse(name: str, why: str) -> None:
        problems.append(((index, name), f"cannot use [{index}].{name}: {why}"))

    for name in map(str, entry):
        if name not in ("parameter", "value", *_IGNORED):
            refuse(name, "there is no such key; keep only parameter and value")
    for name in ("parameter", "value"):
        if name not in entry:
            problems.append(((index,), f"cannot import [{index}]: {name} is missing; write {_EXAMPLE}"))
    too_deep = [name for name in ("parameter", "value") if is_too_deep(entry.get(name))]
    for name in too_deep:
        refuse(name, f"it is {TOO_DEEP}; remove this result, or make it flatter")
    if too_deep:
        return None, problems
    metric, parameters = _metric_of(entry), entry.get("parameter")
    number = objectives.value_of(metric)
    if isinstance(parameters, Mapping):
        parameters = without_added(space, parameters)
        for problem in problems_within(space, tuner, parameters):
            refuse("parameter", f"{problem}; remove this result, or widen the search space first")
    elif "parameter" in entry:
        refuse("parameter", f"{shown(parameters)} is not a mapping; remove this result, or write a mapping")
    if problems or number is None or not isinstance(parameters, Mapping):
        return None, problems
    return PriorResult(parameters, number, metric), []
