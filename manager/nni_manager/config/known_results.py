"""Results from elsewhere that a tuner may learn from, as `nnictl experiment export` writes them.

Source: NNI v2.0, nnictl experiment import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nni_manager.config.mistakes import MOST_MISTAKES, ConfigInvalid, Mistake, key_of, shown
from nni_manager.config.search_space import Path, SearchSpace
from nni_manager.domain.metrics import reward

_EXAMPLE = '[{"parameter": {"lr": 0.1}, "value": 0.93}]'
# What an export has beside the two, and what later versions of NNI call it.
_IGNORED = ("trialJobId", "id")


@dataclass(frozen=True, slots=True)
class KnownResult:
    """What some parameters came to that the tuner did not propose. `value` is the number to learn from; None: there is none.

    `metric` is all that was reported as the result, as JSON text.
    """

    parameters: Mapping[str, Any]
    value: float | None
    metric: str


def results_of(raw: Any, space: SearchSpace, tuner: str) -> list[KnownResult]:
    """The results a JSON document lists.

    Raises:
        ConfigInvalid: with every mistake of the document, without file and line.
    """
    results, problems = read_results(raw, space, tuner)
    if problems:
        raise ConfigInvalid(Mistake("", None, None, key_of(path), message) for path, message in problems)
    return results


def read_results(
    raw: Any, space: SearchSpace, tuner: str
) -> tuple[list[KnownResult], list[tuple[Path, str]]]:
    """The results, and every mistake with its path in the document, up to MOST_MISTAKES: when there is one, use none of them.

    `tuner`: the name of the one that is to learn from them.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        return [], [((), f"cannot import {shown(raw)}: it is no list of results; write {_EXAMPLE}")]
    results: list[KnownResult] = []
    problems: list[tuple[Path, str]] = []
    for index, entry in enumerate(raw):
        found, wrong = _read(entry, index, space, tuner)
        problems += wrong
        if found is not None:
            results.append(found)
        if len(problems) >= MOST_MISTAKES:
            break
    return results, problems[:MOST_MISTAKES]


def _read(
    entry: Any, index: int, space: SearchSpace, tuner: str
) -> tuple[KnownResult | None, list[tuple[Path, str]]]:
    # Here: the store speaks of results, too, and whoever only lists trials need not wait for all the schemas.
    from nni_manager.config.algorithms import problems_within

    here: Path = (index,)
    if not isinstance(entry, Mapping):
        return None, [(here, f"cannot import [{index}]: {shown(entry)} is no result; write {_EXAMPLE}")]
    problems: list[tuple[Path, str]] = [
        (
            (*here, str(name)),
            f"cannot use [{index}].{name}: there is no such key; keep parameter and value only",
        )
        for name in entry
        if name not in ("parameter", "value", *_IGNORED)
    ]
    for name in ("parameter", "value"):
        if name not in entry:
            problems.append((here, f"cannot import [{index}]: {name} is missing; write {_EXAMPLE}"))
    value, parameters = entry.get("value"), entry.get("parameter")
    metric = value if isinstance(value, str) else json.dumps(value)
    number = reward(metric)
    if number is None and "value" in entry:
        problems.append(
            (
                (*here, "value"),
                f"cannot use [{index}].value: {'null' if value is None else shown(value)} has no finite number; write a "
                "number, or a mapping with one under default, or leave this result out",
            )
        )
    if "parameter" in entry:
        problems += [
            (
                (*here, "parameter"),
                f"cannot use [{index}].parameter: {problem}; leave this result out, or widen the search space first",
            )
            for problem in (
                problems_within(space, tuner, parameters)
                if isinstance(parameters, Mapping)
                else [f"{shown(parameters)} is no mapping"]
            )
        ]
    if problems or number is None or not isinstance(parameters, Mapping):
        return None, problems
    return KnownResult(dict(parameters), number, metric), []
