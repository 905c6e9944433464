"""The documents of the HTTP API whose fields NNI's clients read."""

import dataclasses
from pathlib import Path

import pytest
from attempts import attempt_id
from made_experiment import Played, made_experiment, made_trial, write

from nni_manager.domain.ingest import StreamWrite
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from nni_manager.engine.nni_views import TrialReport, reports_of, trial_job_view
from nni_manager.engine.serializers import (
    counts_view,
    errors_view,
    jobs_view,
    metric_view,
    statistics_view,
    transport_view,
    why_of,
)
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import MetricRow, SeenJob, attempt_row
from nni_sdk.records import decode, encode
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.reasons import ExitReason

KEY = AttemptKey("00000", attempt_id(0), "main-0")
STDERR = Path("/mnt/exp/stderr")


@pytest.fixture
def played(tmp_path):
    return Played(made_experiment(tmp_path, 0).folder)


def a_record(*, is_final):
    return MetricRow("00000", 0, "main-0", 7, is_final, "3", 2, '{"default": 0.5}', 9.0)


@pytest.mark.parametrize(("is_final", "kind"), [(True, "FINAL"), (False, "PERIODICAL")])
def test_a_metric_has_the_fields_of_nni(is_final, kind):
    assert metric_view(a_record(is_final=is_final)) == {
        "timestamp": 9000,
        "trialJobId": "00000",
        "parameterId": "3",
        "type": kind,
        "sequence": 2,
        "data": '"{\\"default\\": 0.5}"',
    }


@pytest.mark.parametrize(
    ("state", "has_path"),
    [(TrialState.FAILED, True), (TrialState.SUCCEEDED, False), (TrialState.USER_CANCELED, False)],
)
def test_only_a_failed_trial_has_the_path_of_its_stderr(played, state, has_path):
    trial = Trial("00000", 0, {}, {}, 1.0, job_id="job", state=state)
    snapshot = played.snapshot()
    shown = trial_job_view(snapshot, trial, {"00000": TrialReport(stderr=STDERR)})
    assert shown.get("stderrPath") == (str(STDERR) if has_path else None)
    assert "stderrPath" not in trial_job_view(snapshot, trial, {}), "no attempt of the trial is known"
    assert shown["startTime"] == 1000


def test_the_final_result_of_a_trial_has_the_fields_of_its_stored_record(played):
    snapshot, reports = played.snapshot(), {"00000": TrialReport(a_record(is_final=True))}
    with_result = made_trial(0, 5.0)
    assert trial_job_view(snapshot, with_result, reports)["finalMetricData"] == [
        metric_view(a_record(is_final=True))
    ]
    without_result = Trial("00000", 0, {}, {}, 1.0, job_id="job", run=TrialRun())
    assert "finalMetricData" not in trial_job_view(snapshot, without_result, reports)


def test_the_report_of_a_trial_has_its_stored_final_record_and_the_stderr_of_its_attempt(tmp_path):
    folder = made_experiment(tmp_path, 2).folder
    data = encode(0, "00000", "PERIODICAL", 0, 0.1) + encode(0, "00000", "FINAL", 0, 0.5)
    records = tuple(decode(data, 0).records)
    write(folder, attempt_row(KEY, 0), StreamWrite(KEY, Stream.METRICS, 0, len(data), records=records))
    with StoreReader(folder.database) as reader:
        for trial in (None, made_trial(0, 5.0)):
            (report,) = reports_of(reader, folder.workspace, trial).values()
            assert report.final is not None
            assert (report.final.trial_id, report.final.is_final, report.final.value) == (
                "00000",
                True,
                "0.5",
            )
            assert report.stderr == folder.workspace.attempt(KEY).stream(Stream.STDERR)


def test_trials_are_counted_by_the_statuses_of_nni(played):
    assert (statistics_view(played.experiment), errors_view(played.experiment)) == ([], [])
    counts = played.experiment.lifecycle.counts
    counts[TrialState.SUCCEEDED], counts[TrialState.STOPPING], counts[TrialState.RUNNING] = 3, 1, 2
    shown = counts_view(played.experiment)
    assert (shown["SUCCEEDED"], shown["RUNNING"], shown["FAILED"]) == (3, 3, 0)
    assert statistics_view(played.experiment) == [
        {"trialJobStatus": "RUNNING", "trialJobNumber": 3},
        {"trialJobStatus": "SUCCEEDED", "trialJobNumber": 3},
    ]
    played.experiment.error = "the tuner failed"
    assert errors_view(played.experiment) == ["the tuner failed"]


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (TrialRun(), ""),
        (TrialRun(reason=ExitReason.SUCCEEDED, exit_code=0, message="one warning"), "one warning"),
        (
            TrialRun(reason=ExitReason.NONZERO_EXIT, exit_code=3, message="ValueError: x"),
            "exit code 3: ValueError: x",
        ),
    ],
)
def test_the_reason_for_the_end_of_a_trial_is_one_line(run, why):
    assert why_of(Trial("t", 0, {}, {}, 1.0, "job", run=run)) == why


def test_an_unfinished_trial_shows_its_transport_and_the_time_since_the_last_contact(played):
    snapshot = dataclasses.replace(played.snapshot(), now_s=99.04)
    snapshot.experiment.transports.track("job", 1.0)
    snapshot.experiment.transports.connected("job", "main-0", 61.0)
    trial = Trial("t", 0, {}, {}, 1.0, job_id="job", state=TrialState.RUNNING)
    assert transport_view(snapshot, trial) == {"transport": "grpc", "road": "stream", "lastContactAgoS": 38.0}
    ended = dataclasses.replace(trial, state=TrialState.FAILED)
    assert transport_view(snapshot, ended) == {"transport": None, "road": None, "lastContactAgoS": None}


def test_a_job_lists_its_own_trials_and_whether_the_platform_has_its_log(tmp_path):
    snapshot = ExperimentSnapshot.stored(made_experiment(tmp_path, 3).folder)
    with_log = dataclasses.replace(snapshot, job_log=lambda *_: None)
    (shown,) = jobs_view(dataclasses.replace(with_log, is_view=True), [SeenJob("00001", 2.0, 3.0)])
    assert (shown["trialIds"], shown["trialCount"], shown["hasLog"]) == (["00001"], 1, True)
    assert shown["state"] == "ended", "a view knows the state of a job that had ended"
    (shown,) = jobs_view(dataclasses.replace(snapshot, job_log=None), [SeenJob("00001", 2.0, 3.0)])
    assert shown["hasLog"] is False
