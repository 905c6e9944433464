"""The rows of tables of trials: what a list of ten thousand trials shows of each, in JSON."""

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any

from nni_manager.domain.message_summary import message_summary
from nni_manager.domain.metrics import MAX_PARSED_CHARACTERS, numbers_in, reward
from nni_manager.domain.trial import Trial
from nni_manager.engine.serializers import ms, why_of

# A table of ten thousand rows shows one line of a trial's texts.
_MAX_CELL = 256
_MAX_MESSAGE = 300
# The maximum number of metrics that are shown as columns.
_MAX_METRICS = 20


def row_view(trial: Trial, *, is_whole: bool = False) -> dict[str, Any]:
    """One row of a table of all trials: small, and without values that change over time by themselves.

    `is_whole`: with all parameters and metrics in full, for downloads. Else `cut` marks a row that leaves some out.
    """
    parameters = trial.parameters if is_whole else row_parameters(trial)
    reason = trial.run.reason and trial.run.reason.value
    row = {
        "id": trial.trial_id,
        "seq": trial.sequence_id,
        "state": trial.state.value,
        "status": trial.state.nni_status,
        "parameters": parameters,
        "value": trial.run.value,
        "latest": latest_of(trial),
        "count": trial.run.intermediate_count,
        "submit": ms(trial.created_at_s),
        "start": ms(trial.run.started_at_s),
        "end": ms(trial.run.ended_at_s),
        "reason": reason,
        "exitCode": trial.run.exit_code,
        "message": row_message(trial),
        "attempt": trial.run.attempt,
        "customized": trial.is_customized,
    }
    if not trial.run.is_feasible:
        row["infeasible"] = True
    if trial.stopping_since_s is not None:
        row["stoppingSince"] = ms(trial.stopping_since_s)
    if why := why_of(trial):
        row["why"] = why[:_MAX_MESSAGE]
    if trial.remarks.tags:
        row["tags"] = list(trial.remarks.tags)
    if note := row_note(trial):
        row["note"] = note
    if trial.warning:
        row["warning"] = trial.warning.partition("\n")[0][:_MAX_MESSAGE]
    metrics = _metrics(trial, None if is_whole else _MAX_METRICS + 1)
    if metrics:
        row["metrics"] = metrics if is_whole else _first(metrics)
    if parameters != trial.parameters or (not is_whole and _leaves_out(trial, metrics)):
        row["cut"] = True
    return row


def row_parameters(trial: Trial) -> dict[str, Any]:
    """The parameters in a row: long values are truncated."""
    return {name: _cell(value) for name, value in trial.parameters.items()}


def latest_of(trial: Trial) -> float | None:
    """The number of the newest intermediate result: that of the first objective, or the result itself."""
    if trial.run.intermediate is None:
        return None
    named = reward(trial.run.intermediate, trial.metrics[0])
    return reward(trial.run.intermediate) if named is None else named


def row_message(trial: Trial) -> str:
    """The most informative line of the trial's message."""
    if not trial.run.message:
        return ""
    reason = trial.run.reason.value if trial.run.reason else ""
    return message_summary(reason, trial.run.message, trial.run.exit_code)[:_MAX_MESSAGE]


def row_note(trial: Trial) -> str:
    """The first line of the trial's note."""
    return trial.remarks.note.partition("\n")[0][:_MAX_MESSAGE]


def row_metrics(trial: Trial) -> Mapping[str, float]:
    """The numbers of a final result that is a dict: those of objectives and constraints, then others, up to a limit.

    `default` is left out where it is the first objective.
    """
    return _first(_metrics(trial, _MAX_METRICS + 1))


def _first(metrics: Mapping[str, float]) -> Mapping[str, float]:
    return metrics if len(metrics) <= _MAX_METRICS else dict(islice(metrics.items(), _MAX_METRICS))


def _leaves_out(trial: Trial, metrics: Mapping[str, float]) -> bool:
    """True if a row has not all numbers of the result. `metrics`: up to one more than it has."""
    if len(metrics) > _MAX_METRICS:
        return True
    result = trial.result
    return result is not None and len(result) > MAX_PARSED_CHARACTERS and result.startswith("{")


def _metrics(trial: Trial, most: int | None) -> Mapping[str, float]:
    if trial.result is None:
        return {}
    return numbers_in(trial.result, most, trial.metrics, without_default=trial.metrics[0] == "default")


def _cell(value: Any) -> Any:
    if isinstance(value, (int, float)) or value is None:
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}…"
