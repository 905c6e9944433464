"""Converts trials to JSON with NNI's fields only: the client of NNI 2.10 refuses any other.

Source: NNI v2.10 and v3.0, TrialJobInfo of the manager and nni.experiment.TrialJob.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nni_manager.domain.trial import Trial
from nni_manager.engine import serializers
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.engine.trial_messages import message_of
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import MetricRow
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.messages import Stream
from trial_keeper.wire.workspace import Workspace


@dataclass(frozen=True, slots=True)
class TrialReport:
    """What the store has of a trial's report: the final record that counts, and the file of the stderr of its task."""

    final: MetricRow | None = None
    stderr: Path | None = None


def reports_of(
    reader: StoreReader, workspace: Workspace, trial: Trial | None = None
) -> Mapping[str, TrialReport]:
    """The report of a trial, or of each trial that has an attempt, by trial."""
    attempts = {
        each.key.trial_id: each.key for each in reader.attempts(None if trial is None else trial.trial_id)
    }
    span = () if trial is None else (trial.sequence_id, trial.sequence_id)
    finals = {row.trial_id: row for page in reader.metric_pages(True, *span) for row in page}
    return {
        trial_id: TrialReport(finals.get(trial_id), workspace.attempt(key).stream(Stream.STDERR))
        for trial_id, key in attempts.items()
    }


def trial_jobs_view(
    snapshot: ExperimentSnapshot, trials: Iterable[Trial], reports: Mapping[str, TrialReport]
) -> list[dict[str, Any]]:
    """The trials, as `trial_job_view`."""
    return [trial_job_view(snapshot, trial, reports) for trial in trials]


def trial_job_view(
    snapshot: ExperimentSnapshot, trial: Trial, reports: Mapping[str, TrialReport]
) -> dict[str, Any]:
    """One trial. NNI's client requires a start, which NNI counts from the submission."""
    reported = reports.get(trial.trial_id, TrialReport())
    fields = serializers.nni_fields(snapshot, trial)
    if trial.run.final is not None and reported.final is not None:
        fields["finalMetricData"] = [serializers.metric_view(reported.final)]
    if reported.stderr is not None and trial.state.nni_status == "FAILED":
        fields["stderrPath"] = str(reported.stderr)
    submitted = {"startTime": serializers.ms(trial.created_at_s)}
    return submitted | fields | {"message": message_of(snapshot, trial)}
