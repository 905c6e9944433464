"""Export to MLflow: an MLflow experiment for the experiment, a run for each trial.

A repeated export continues: finished runs stay as they are, and the others receive what is new.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy.exc import SQLAlchemyError

from nni_manager.domain.trial import TrialState
from nni_manager.errors import RetryableError
from nni_manager.trackers import TrackerMissing, without_logins
from nni_manager.trackers.source import Run, Source

# Limits of one call, of a value and of a name. Source: MLflow 3, "Log Batch" of its REST API.
_MAX_METRICS, _MAX_PARAMETERS = 1000, 100
_MAX_VALUE_CHARS = 6000
_MAX_NAME_CHARS = 250
_TRIAL_ID = "trial_keeper.trial_id"
_STATE = "trial_keeper.state"
_STATUS = {TrialState.FAILED: "FAILED", TrialState.USER_CANCELED: "KILLED", TrialState.SYS_CANCELED: "KILLED"}
_FINAL = "final/"
_REFUSED = re.compile(r"[^\w\-./: ]")
_Logged = dict[tuple[str, int], float]
"""Values by the name of the metric and the step."""
_ENDED = ("FINISHED", "FAILED", "KILLED")


class MlflowRefusal(RetryableError):
    """cannot export to MLflow: its server refuses, or cannot be reached; check the tracking URI and repeat the command"""


def export(source: Source, runs: Iterable[Run], target: str) -> None:
    """Write the runs to the server or the database at a tracking URI.

    Raises:
        MlflowRefusal: MLflow or its database raised an error.
        TrackerMissing: the driver of the database is not installed.
    """
    try:
        client = MlflowClient(target)
        experiment_id = _experiment(client, source)
        known = {run.data.tags.get(_TRIAL_ID): run for run in _known_runs(client, experiment_id)}
        for run in runs:
            _write(client, experiment_id, run, known.get(run.trial_id))
    except ModuleNotFoundError as error:
        raise TrackerMissing(
            f"cannot export to MLflow: the database driver {error.name} is not installed; run `pip install {error.name}`"
        ) from error
    except (MlflowException, SQLAlchemyError) as error:
        first = without_logins(str(error).splitlines()[0])
        raise MlflowRefusal(
            f"cannot export to MLflow: {first}; check the tracking URI and repeat the command, which continues"
        ) from error


def _experiment(client: MlflowClient, source: Source) -> str:
    # The id makes the name unique: MLflow refuses a second experiment of the same name.
    name = f"{source.name} {source.experiment_id}"
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, tags={"trial_keeper.experiment_id": source.experiment_id}))
    return str(found.experiment_id)


def _known_runs(client: MlflowClient, experiment_id: str) -> Iterator[Any]:
    token = None
    while True:
        page = client.search_runs([experiment_id], max_results=1000, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _write(client: MlflowClient, experiment_id: str, run: Run, known: Any | None) -> None:
    tags = {_TRIAL_ID: run.trial_id, _STATE: run.state.value, "mlflow.note.content": run.note}
    tags |= {_plain(f"tag.{tag}"): "true" for tag in run.tags}
    has_ended = known is not None and known.info.status in _ENDED
    logged: _Logged = {}
    if known is not None and not has_ended:
        logged = _logged(client, known)
        if not _continues(run, logged):
            # The trial was retried meanwhile, and its learning curve is another one.
            client.delete_run(known.info.run_id)
            known, logged = None, {}
    if known is None:
        known = client.create_run(experiment_id, _ms(run.started_at_s), {_TRIAL_ID: run.trial_id}, run.name)
    run_id = known.info.run_id
    for name, value in tags.items():
        if known.data.tags.get(name, "") != value:
            client.set_tag(run_id, name, value)
    if has_ended:
        return
    # An interrupted export may have logged a part of them.
    names = _Names()
    named = {names[name]: value for name, value in run.parameters.items()}
    parameters = (
        Param(name, f"{value}"[:_MAX_VALUE_CHARS])
        for name, value in named.items()
        if name not in known.data.params
    )
    while batch := list(islice(parameters, _MAX_PARAMETERS)):
        client.log_batch(run_id, params=batch)
    metrics = _metrics(run, logged)
    while points := list(islice(metrics, _MAX_METRICS)):
        client.log_batch(run_id, metrics=points)
    if run.state.is_terminal:
        client.set_terminated(run_id, _STATUS.get(run.state, "FINISHED"), _ms(run.end_s))


def _logged(client: MlflowClient, known: Any) -> _Logged:
    """The intermediate results that a run of MLflow has."""
    run_id = known.info.run_id
    names = [name for name in known.data.metrics if not name.startswith(_FINAL)]
    return {
        (name, each.step): each.value for name in names for each in client.get_metric_history(run_id, name)
    }


def _continues(run: Run, logged: _Logged) -> bool:
    """True if the trial still has all values that were logged."""
    missing, names = dict(logged), _Names()
    for point in run.points():
        if not missing:
            break
        for name, value in point.values.items():
            key = (names[name], point.step)
            if key in missing and _is_same(missing[key], value):
                del missing[key]
    return not missing


def _is_same(stored: float, value: float) -> bool:
    # MLflow stores an infinity as the largest float.
    return stored == value or (not math.isfinite(value) and (math.isnan(stored) or abs(stored) > 1e308))


def _metrics(run: Run, logged: _Logged) -> Iterator[Metric]:
    """The values that are not logged yet."""
    names = _Names()
    for point in run.points():
        for name, value in point.values.items():
            if (names[name], point.step) not in logged:
                yield Metric(names[name], value, _ms(point.time_s), point.step)
    if run.state.is_terminal:
        for name, value in run.final.items():
            yield Metric(names[f"{_FINAL}{name}"], value, _ms(run.end_s), 0)


def _ms(time_s: float) -> int:
    return round(time_s * 1000)


class _Names(dict[str, str]):
    """The name in MLflow for each name of a run, in the order of their first use: no two become the same."""

    def __missing__(self, name: str) -> str:
        plain, used = _plain(name), set(self.values())
        numbered = (f"{plain[: _MAX_NAME_CHARS - 10]}_{number}" for number in count(2))
        self[name] = next(each for each in chain((plain,), numbered) if each not in used)
        return self[name]


def _plain(name: str) -> str:
    """A name that MLflow accepts: it is also a relative path, whose parts are not empty and start with no dot."""
    parts = _REFUSED.sub("_", name[:_MAX_NAME_CHARS]).split("/")
    return "/".join(part.lstrip(".") or "_" for part in parts)
