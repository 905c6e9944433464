"""Results from elsewhere that a tuner may learn from, as `nnictl experiment export` writes them.

Source: NNI v2.0, nnictl experiment import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nni_manager.config.mistakes import MOST_MISTAKES, ConfigInvalid, Mistake, key_of, shown
from nni_manager.config.search_space import Path, SearchSpace, contains
from nni_manager.domain.metrics import reward

_EXAMPLE = '[{"parameter": {"lr": 0.1}, "value": 0.93}]'
# What an export has beside the two, and what later versions of NNI call it.
_IGNORED = ("trialJobId", "id")


@dataclass(frozen=True, slots=True)
class KnownResult:
    """Parameters of a search space, and the finite number that they came to."""

    parameters: Mapping[str, Any]
    value: float


def results_of(raw: Any, space: SearchSpace) -> list[KnownResult]:
    """The results a JSON document lists.

    Raises:
        ConfigInvalid: with every mistake of the document, without file and line.
    """
    results, problems = read_results(raw, space)
    if problems:
        raise ConfigInvalid(Mistake("", None, None, key_of(path), message) for path, message in problems)
    return results


def read_results(raw: Any, space: SearchSpace) -> tuple[list[KnownResult], list[tuple[Path, str]]]:
    """The results, and every mistake with its path in the document, up to MOST_MISTAKES: when there is one, use none of them."""
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        return [], [((), f"cannot import {shown(raw)}: it is no list of results; write {_EXAMPLE}")]
    results: list[KnownResult] = []
    problems: list[tuple[Path, str]] = []
    for index, entry in enumerate(raw):
        found, wrong = _read(entry, index, space)
        problems += wrong
        if found is not None:
            results.append(found)
        if len(problems) >= MOST_MISTAKES:
            break
    return results, problems[:MOST_MISTAKES]


def _read(entry: Any, index: int, space: SearchSpace) -> tuple[KnownResult | None, list[tuple[Path, str]]]:
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
    number = reward(value if isinstance(value, str) else json.dumps(value))
    if number is None and "value" in entry:
        problems.append(
            (
                (*here, "value"),
                f"cannot use [{index}].value: {shown(value)} has no finite number; write a number, or a mapping with one "
                "under default, or leave this result out",
            )
        )
    if "parameter" in entry:
        problems += [
            (
                (*here, "parameter"),
                f"cannot use [{index}].parameter: {problem}; leave this result out, or widen the search space first",
            )
            for problem in (
                contains(space, parameters)
                if isinstance(parameters, Mapping)
                else [f"{shown(parameters)} is no mapping"]
            )
        ]
    if problems or number is None or not isinstance(parameters, Mapping):
        return None, problems
    return KnownResult(dict(parameters), number), []
