"""Chooses the parameters with which a search starts: the best ones of the experiments and files that `warmStart` names.

The choice is made once, when an experiment is created, and stored with it. A source that cannot be used is a warning, and the
search starts without it. Each source gives one point, or a few of its Pareto front: results of different experiments cannot
always be compared, and each point costs a trial.

Import this module late: most commands need neither tuners nor SQLite.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from nni_manager.client import output
from nni_manager.client.experiments import KnownExperiment, known_experiments, resolve
from nni_manager.config.algorithms import TUNERS, problems_within, without_added
from nni_manager.config.diagnostics import key_of
from nni_manager.config.document import read_json
from nni_manager.config.model import ExperimentSpec, PriorPoint
from nni_manager.config.search_space import paths_of
from nni_manager.engine.trial_sample import even
from nni_manager.errors import NniManagerError, UserError
from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry

MAX_AUTOMATIC = 5
"""How many experiments `auto` uses, the newest first."""
MAX_OF_FRONT = 5
"""How many points of one Pareto front are used, evenly chosen."""
# As for imported results.
_MAX_FILE_BYTES = 4 * 1024 * 1024
_ID = re.compile(r"[A-Za-z0-9]{1,32}")
_Result = tuple[Mapping[str, Any], str]
"""The parameters of a trial, and its final result as JSON text."""


class UnusableForWarmStart(UserError):
    """cannot start with results of an experiment: it does not fit; remove it from warmStart"""


def with_warm_start(config: ExperimentSpec) -> ExperimentSpec:
    """The experiment with the points that its `warmStart` names, and a warning for each source that cannot be used."""
    asked = _asked(config)
    if not asked:
        return config
    choice = _Choice(config)
    if asked == "auto":
        choice.add_automatic()
    else:
        for each in dict.fromkeys(asked):
            choice.add_named(each)
    return config.replace(warm_start=tuple(choice.points), warnings=(*config.warnings, *choice.warnings))


def print_points(config: ExperimentSpec) -> None:
    """Print the points with which the search starts, and what they are from."""
    for point in config.warm_start:
        output.info(
            f"start with the best of {point.source}, {point.value:g}: {output.parameters(point.parameters)}"
        )
    if _asked(config) and not config.warm_start:
        output.info("warmStart has found no earlier result to start with")


def _asked(config: ExperimentSpec) -> str | list[str] | None:
    if config.tuner.own is not None:
        return None  # the classArgs are those of a user's class
    return TUNERS[config.tuner.name].args.model_validate(config.tuner.class_args).warm_start


class _Choice:
    """Collects points for one new experiment."""

    def __init__(self, config: ExperimentSpec) -> None:
        self.points: list[PriorPoint] = []
        self.warnings: list[str] = []
        self._config, self._paths = config, paths_of(config.search_space)
        self._started = [*config.initial_trials]
        """The parameters with which the search starts already."""

    def add_named(self, source: str) -> None:
        """Add the points of an experiment or of a file."""
        try:
            if _ID.fullmatch(source):
                self._add_experiment(resolve(source))
            else:
                self._add(source, _results_in(self._config.config_path.parent / os.path.expanduser(source)))
        except NniManagerError as error:
            self._warn(error)

    def add_automatic(self) -> None:
        """Add the points of this user's newest finished experiments with the same parameters."""
        added_at_s = Registry.of_user().added_at_s
        used = 0
        for known in sorted(known_experiments(), key=lambda each: -added_at_s(each.experiment_id)):
            try:
                self._add_experiment(known)
            except UnusableForWarmStart:
                continue  # nobody has named it
            except NniManagerError as error:
                self._warn(error)
            else:
                used += 1
            if used == MAX_AUTOMATIC:
                break

    def _warn(self, error: NniManagerError) -> None:
        self.warnings.append(f"{error}; the search starts without it (warmStart)")

    def _add_experiment(self, known: KnownExperiment) -> None:
        name, objectives = known.experiment_id, self._config.all_objectives

        def refuse(why: str) -> UnusableForWarmStart:
            return UnusableForWarmStart(f"cannot start with results of experiment {name}: {why}")

        if known.problem:
            raise UserError(known.problem)
        state = known.stored.read(StoreReader.experiment).state
        if not state.is_terminal:
            raise refuse(f"it is {state.value}; wait for its end, or stop it with `nnictl stop {name}`")
        source = known.stored.config()
        if (paths := paths_of(source.search_space)) != self._paths:
            raise refuse(f"{_difference(self._paths, paths)}; name one with the same parameters")
        modes = {each.metric: each.mode for each in source.all_objectives.all}
        for each in objectives.all:
            if modes.get(each.metric, each.mode) != each.mode:
                raise refuse(
                    f"it has to {modes[each.metric]} {each.metric}, and this one to {each.mode} it; name one with the same goal"
                )
        known.stored.read(
            lambda reader: self._add(
                f"experiment {name}", ((each, text) for _, each, text in reader.results())
            )
        )

    def _add(self, source: str, results: Iterable[_Result]) -> None:
        """Add the best of these results that lie in the search space.

        Raises:
            UnusableForWarmStart: there is none.
        """
        objectives, config = self._config.all_objectives, self._config
        own = ((without_added(config.search_space, each), text) for each, text in results)
        ranked = objectives.ranked((each, each[1]) for each in own)
        problems: list[str] = []

        def lies_within(parameters: Mapping[str, Any]) -> bool:
            found = problems_within(config.search_space, config.tuner.name, parameters)
            problems.extend(found[:1])
            return not found

        inside = (each for each in ranked if lies_within(each[0]))
        if objectives.has_several:
            front = list(inside)
            best = [front[place] for place in even(len(front), MAX_OF_FRONT)]
        else:
            best = list(islice(inside, 1))
        if not best:
            wanted = " and ".join(objectives.metrics)
            why = (
                f"no result lies in the search space ({problems[0]})"
                if problems
                else f"it has no result with {wanted} that counts"
            )
            raise UnusableForWarmStart(f"cannot start with results of {source}: {why}; name another one")
        if problems:
            self.warnings.append(
                f"better results of {source} lie outside the search space and are not used (warmStart): {problems[0]}"
            )
        for parameters, text in best:
            if parameters not in self._started:
                self._started.append(dict(parameters))
                value = objectives.value_of(text)
                assert value is not None  # it is ranked
                self.points.append(PriorPoint(source, dict(parameters), value))


def _difference(wanted: set[tuple[str, ...]], found: set[tuple[str, ...]]) -> str:
    sides = (("it lacks", wanted - found), ("this one lacks", found - wanted))
    return "its search space has other parameters: " + ", ".join(
        f"{side} {', '.join(sorted(map(key_of, paths)))}" for side, paths in sides if paths
    )


def _is_result(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("parameter"), Mapping) and "value" in entry


def _results_in(path: Path) -> Iterator[_Result]:
    """The results in a file that `nnictl experiment export` has written.

    Raises:
        UserError: the file is none of these, or cannot be read.
    """
    raw = read_json(path, _MAX_FILE_BYTES).value
    if not isinstance(raw, list) or not all(map(_is_result, raw)):
        raise UserError(
            f"cannot start with results of {path}: it is not a list of results; write it with `nnictl experiment export ID`"
        )
    for each in raw:
        value = each["value"]
        yield each["parameter"], value if isinstance(value, str) else json.dumps(value)
