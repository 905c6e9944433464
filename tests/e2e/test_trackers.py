"""Exports to MLflow, TensorBoard and W&B, read back with their own libraries."""

import contextlib
import json
import math
import re
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from attempts import RegisteringStore, attempt_id
from stored_experiments import experiments_in

from nni_manager.cli import main
from nni_manager.domain.ingest import AttemptIngest
from nni_manager.domain.remarks import Remarks
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from nni_manager.store.rows import remarks_row, trial_row
from trial_keeper.wire.messages import AttemptKey, Stream

# DeprecationWarnings are ignored, because MLflow uses deprecated parts of SQLAlchemy, and W&B uses deprecated parts of its own
# code.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STARTED_S, ENDED_S, STORED_S = 1000.0, 1060.0, 1010.0
PARAMETERS = {"lr": 0.25, "layer": {"_name": "dense", "size": 64}, "name with ü": True}
RUNNING, SUCCEEDED, FAILED = TrialState.RUNNING, TrialState.SUCCEEDED, TrialState.FAILED


@pytest.fixture
def nnictl(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main.run(list(arguments))
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def folder(nnictl, tmp_path):
    with experiments_in(tmp_path) as make:
        yield make("abc11111")


def trial(number, state, final=None, attempt=0, parameters=PARAMETERS):
    has_ended = state is not RUNNING
    return Trial(
        f"t{number}",
        number,
        parameters,
        {},
        STARTED_S,
        f"t{number}",
        state,
        run=TrialRun(
            attempt=attempt,
            started_at_s=STARTED_S,
            ended_at_s=ENDED_S if has_ended else None,
            final=None if final is None else json.dumps(final),
            value=None,
            reporter="main-0",
        ),
    )


def store(folder, stored, *values, attempt=0):
    """Stores the trial, and these intermediate results of its attempt."""
    records = [
        json.dumps({"parameter_id": 0, "trial_job_id": stored.trial_id, "type": "PERIODICAL",
                    "sequence": step, "value": json.dumps(value)}).encode() + b"\n"
        for step, value in enumerate(values)
    ]  # fmt: skip
    receiver = AttemptIngest(AttemptKey(stored.trial_id, attempt_id(attempt), "main-0"))
    frames = b"".join(b"ME%06d" % len(record) + record for record in records)
    with contextlib.closing(RegisteringStore(folder.database, folder.collected_logs)) as opened:
        writes = receiver.take(Stream.METRICS, 0, frames) if values else []
        opened.commit([trial_row(stored), *writes], STORED_S)


# ---- MLflow


@pytest.fixture
def mlflow_runs(nnictl, tmp_path):
    """Exports to an SQLite database; returns MLflow's client and the runs by the name of the run."""
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    def export():
        code, out, err = nnictl("experiment", "export", "-t", "mlflow", "-f", uri)
        assert code == 0, err
        assert out.startswith("INFO: Wrote ")
        client = mlflow.MlflowClient(uri)
        found = client.get_experiment_by_name("digits abc11111")
        return client, {run.info.run_name: run for run in client.search_runs([found.experiment_id])}

    return export


def history(client, run, name):
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]


@pytest.mark.smoke
def test_mlflow_receives_each_trial_with_its_parameters_metrics_times_and_status(folder, mlflow_runs):
    store(folder, trial(0, SUCCEEDED, {"default": 0.9, "loss": 0.1, "text": "x"}), 0.5, {"default": 0.75})
    store(folder, trial(1, FAILED))

    client, runs = mlflow_runs()

    succeeded, failed = runs["0-t0"], runs["1-t1"]
    assert succeeded.data.params == {
        "lr": "0.25", "layer/_name": "dense", "layer/size": "64", "name with ü": "True"
    }  # fmt: skip
    assert history(client, succeeded, "default") == [(0, 0.5), (1, 0.75)]
    assert succeeded.data.metrics == {"default": 0.75, "final/default": 0.9, "final/loss": 0.1}
    assert (succeeded.info.status, succeeded.info.start_time, succeeded.info.end_time) == (
        "FINISHED", 1_000_000, 1_060_000
    )  # fmt: skip
    assert [each.timestamp for each in client.get_metric_history(succeeded.info.run_id, "default")] == [
        1_010_000
    ] * 2
    assert (failed.info.status, failed.data.metrics) == ("FAILED", {})
    assert failed.data.tags["trial_keeper.state"] == "FAILED"


def test_a_repeated_export_to_mlflow_adds_only_new_data(folder, mlflow_runs):
    store(folder, trial(0, SUCCEEDED, 0.9), 0.5)
    store(folder, trial(1, RUNNING), 1.0, math.nan, math.inf)
    _, first = mlflow_runs()
    assert first["1-t1"].info.status == "RUNNING"

    with contextlib.closing(RegisteringStore(folder.database, folder.collected_logs)) as opened:
        opened.commit([remarks_row("t0", Remarks.of(["best"], "keep it"))], STORED_S)
    store(folder, trial(1, SUCCEEDED, 3.0))
    client, second = mlflow_runs()

    assert {name: run.info.run_id for name, run in second.items()} == {
        name: run.info.run_id for name, run in first.items()
    }
    values = history(client, second["1-t1"], "default")
    assert [step for step, _ in values] == [0, 1, 2]
    assert second["1-t1"].info.status == "FINISHED"
    assert history(client, second["0-t0"], "final/default") == [(0, 0.9)]
    tags = second["0-t0"].data.tags
    assert (tags["tag.best"], tags["mlflow.note.content"]) == ("true", "keep it")


def test_a_retried_trial_replaces_its_run_in_mlflow(folder, mlflow_runs):
    store(folder, trial(0, RUNNING), 1.0, 2.0)
    mlflow_runs()
    store(folder, trial(0, SUCCEEDED, 7.0, attempt=1), 5.0, attempt=1)

    client, runs = mlflow_runs()

    assert list(runs) == ["0-t0"]
    assert history(client, runs["0-t0"], "default") == [(0, 5.0)]


AGAIN = "; check the tracking URI and repeat the command, which continues"


@pytest.mark.parametrize(
    ("uri", "remedy"),
    [
        ("http://ada:s3cret@127.0.0.1:9", AGAIN),
        ("sqlite:///config.yml", AGAIN),
        ("mysql+absent://ada:s3cret@127.0.0.1:9/runs", AGAIN),
        ("postgresql+psycopg2://ada:s3cret@127.0.0.1:9/runs", "; run `pip install psycopg2`"),
    ],
)
def test_an_unusable_tracking_uri_causes_a_one_line_error_without_the_password(
    folder, nnictl, monkeypatch, uri, remedy
):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    code, _, err = nnictl("experiment", "export", "-t", "mlflow", "-f", uri)
    assert code == 1
    error = err.splitlines()[-1]
    assert error.startswith("ERROR: cannot export to MLflow: ")
    assert error.endswith(remedy)
    assert "s3cret" not in err
    assert "Traceback" not in err


def test_an_export_to_mlflow_fails_after_three_retries_if_the_server_is_unavailable(
    folder, nnictl, monkeypatch
):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    for name in ("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER"):
        monkeypatch.setenv(name, "0")
    requests = []

    class Unavailable(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_error(503)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        code, _, err = nnictl(
            "experiment", "export", "-t", "mlflow", "-f", f"http://127.0.0.1:{server.server_port}"
        )
        server.shutdown()
        serving.join()
    # MLflow sends one request and three retries. Before each retry, it waits twice as long as before the previous retry.
    assert (code, len(requests)) == (1, 1 + 3)
    assert err.splitlines()[-1].endswith(AGAIN)


def test_a_repeated_export_to_mlflow_adds_the_missing_parameters_of_a_run(folder, mlflow_runs):
    store(folder, trial(0, SUCCEEDED, 0.9), 0.5)
    client, _ = mlflow_runs()
    found = client.get_experiment_by_name("digits abc11111").experiment_id
    store(folder, trial(1, SUCCEEDED, 0.9), 0.5)
    # This run has no parameters, as if the earlier export was killed after it had created the run.
    client.create_run(found, 1_000_000, {"trial_keeper.trial_id": "t1"}, "1-t1")

    _, runs = mlflow_runs()

    assert runs["1-t1"].data.params == runs["0-t0"].data.params
    assert runs["1-t1"].info.status == "FINISHED"


def test_names_stay_different_in_mlflow_if_they_differ_only_in_characters_that_mlflow_refuses(
    folder, mlflow_runs
):
    odd = {"loss/": 1, "a?b": 2, "a_b": 3, "": 4, "..": 5, "x//y": 6, "m" * 300: 7, "m" * 301: 8}
    stored = trial(0, SUCCEEDED, {"default": 0.5} | odd, parameters={"a?b": 1, "a_b": 2})
    store(folder, stored, {"default": 0.5} | odd)

    for _ in range(2):
        _, runs = mlflow_runs()

    data = runs["0-t0"].data
    assert data.params == {"a_b": "1", "a_b_2": "2"}
    intermediate = {name: value for name, value in data.metrics.items() if not name.startswith("final/")}
    assert sorted(intermediate.values()) == [0.5, *range(1, 9)]
    assert len(data.metrics) == 2 * len(intermediate)


# ---- TensorBoard


@pytest.fixture
def event_folder(nnictl, tmp_path):
    """Exports to a folder; returns TensorBoard's reader of the run's folder."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def export(run):
        code, out, err = nnictl("experiment", "export", "-t", "tensorboard", "-f", "board")
        assert code == 0, err
        assert "`tensorboard --logdir board` shows them" in out
        return reading.EventAccumulator(str(tmp_path / "board" / run)).Reload()

    return export


@pytest.mark.smoke
def test_the_export_to_tensorboard_contains_the_metrics_parameters_and_status_of_a_trial(
    folder, event_folder
):
    from tensorboard.plugins.hparams import metadata

    store(folder, trial(0, SUCCEEDED, {"default": 0.9, "loss": 0.25}), 0.5, {"default": 0.75})

    events = event_folder("0-t0")

    assert [(each.step, each.value, each.wall_time) for each in events.Scalars("default")] == [
        (0, 0.5, STORED_S), (1, 0.75, STORED_S)
    ]  # fmt: skip
    assert [each.value for each in events.Scalars("final/loss")] == [0.25]
    content = events.PluginTagToContent(metadata.PLUGIN_NAME)
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert start.hparams["lr"].number_value == 0.25
    assert start.hparams["layer/_name"].string_value == "dense"
    end = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])
    assert (end.end_time_secs, end.status) == (ENDED_S, 1)
    columns = event_folder("experiment-abc11111").PluginTagToContent(metadata.PLUGIN_NAME)
    experiment = metadata.parse_experiment_plugin_data(columns[metadata.EXPERIMENT_TAG])
    assert [each.name.tag for each in experiment.metric_infos] == ["final/default"]


def test_an_integer_too_large_for_a_float_is_exported_to_tensorboard_as_text(folder, event_folder):
    from tensorboard.plugins.hparams import metadata

    store(folder, trial(0, SUCCEEDED, 0.5, parameters={"seed": 10**400}), 0.5)
    content = event_folder("0-t0").PluginTagToContent(metadata.PLUGIN_NAME)
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert start.hparams["seed"].string_value == f"{10**400}"


def test_a_repeated_export_to_tensorboard_replaces_the_event_files(folder, event_folder, tmp_path):
    store(folder, trial(0, RUNNING), 0.5)
    event_folder("0-t0")
    store(folder, trial(0, SUCCEEDED, 1.0))

    events = event_folder("0-t0")

    assert len(events.Scalars("default")) == len(events.Scalars("final/default")) == 1
    assert {each.name for each in (tmp_path / "board").iterdir()} == {"0-t0", "experiment-abc11111"}


def test_an_export_to_tensorboard_refuses_to_replace_a_folder_with_other_files(folder, nnictl, tmp_path):
    pytest.importorskip("tensorboard")
    store(folder, trial(0, SUCCEEDED, 1.0))
    (tmp_path / "board/0-t0").mkdir(parents=True)
    (tmp_path / "board/0-t0/model.pt").write_text("mine")

    code, _, err = nnictl("experiment", "export", "-t", "tensorboard", "-f", "board")

    assert code == 1
    assert "cannot replace board/0-t0: it has files other than TensorBoard's" in err
    assert (tmp_path / "board/0-t0/model.pt").read_text() == "mine"


# ---- W&B


def wandb_records(path):
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format. Source: LevelDB, doc/log_format.md."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # LevelDB pads the end of a block that cannot hold another header
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<4xHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def wandb_file(path):
    (found,) = path.glob("*.wandb")
    return found


def records_of(path, kind):
    return [each for each in wandb_records(wandb_file(path)) if each.WhichOneof("record_type") == kind]


def values_of(items):
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def summary_of(path):
    return values_of(item for each in records_of(path, "summary") for item in each.summary.update)


@pytest.fixture
def offline_run(nnictl, tmp_path):
    """Exports to a folder; returns the directories of the offline runs by run id."""
    pytest.importorskip("wandb")

    def export():
        code, out, err = nnictl("experiment", "export", "-t", "wandb", "-f", "offline")
        assert code == 0, err
        assert "`wandb sync offline/wandb/offline-run-*` uploads them" in out
        folders = (tmp_path / "offline/wandb").glob("offline-run-*")
        return {re.sub(r"offline-run-\w+?-(?=abc)", "", each.name): each for each in folders}

    return export


def test_the_export_to_wandb_contains_parameters_metrics_times_tags_and_exit_codes(folder, offline_run):
    store(folder, trial(0, SUCCEEDED, {"default": 0.9, "loss": 0.25}), 0.5, {"default": 0.75})
    store(folder, trial(1, FAILED))
    with contextlib.closing(RegisteringStore(folder.database, folder.collected_logs)) as opened:
        opened.commit([remarks_row("t0", Remarks.of(["best"], "keep it"))], STORED_S)

    runs = offline_run()

    run = records_of(runs["abc11111-t0"], "run")[0].run
    assert (run.project, run.run_group, run.display_name, list(run.tags), run.notes) == (
        "digits", "abc11111", "0-t0", ["best"], "keep it"
    )  # fmt: skip
    assert values_of(run.config.update)["lr"] == 0.25
    rows = [values_of(each.history.item) for each in records_of(runs["abc11111-t0"], "history")]
    assert [(row["default"], row["_timestamp"], row["_step"]) for row in rows] == [
        (0.5, STORED_S, 0), (0.75, STORED_S, 1)
    ]  # fmt: skip
    codes = {name: [each.exit.exit_code for each in records_of(path, "exit")] for name, path in runs.items()}
    assert codes == {"abc11111-t0": [0], "abc11111-t1": [1]}
    summary = summary_of(runs["abc11111-t0"])
    assert (summary["final/default"], summary["final/loss"], summary["state"]) == (0.9, 0.25, "SUCCEEDED")


def test_a_repeated_export_to_wandb_keeps_ended_runs_and_replaces_running_runs(folder, offline_run):
    store(folder, trial(0, SUCCEEDED, 1.0), 0.5)
    store(folder, trial(1, RUNNING), 0.5)
    first = offline_run()
    times = {name: wandb_file(path).stat().st_mtime_ns for name, path in first.items()}
    store(folder, trial(1, SUCCEEDED, 2.0))

    second = offline_run()

    assert second.keys() == first.keys()
    assert wandb_file(second["abc11111-t0"]).stat().st_mtime_ns == times["abc11111-t0"]
    assert summary_of(second["abc11111-t1"])["state"] == "SUCCEEDED"


def test_wandb_sync_lists_the_exported_runs(folder, offline_run, tmp_path):
    store(folder, trial(0, SUCCEEDED, 1.0), 0.5)
    offline_run()
    program = Path(sys.executable).with_name("wandb")
    listed = subprocess.run(
        [program, "sync", "--dry-run"], cwd=tmp_path / "offline", capture_output=True, text=True
    )
    assert "abc11111-t0" in listed.stdout + listed.stderr
    assert listed.returncode == 0


# ---- any tracker


@pytest.mark.parametrize("kind", ["mlflow", "tensorboard", "wandb"])
def test_a_missing_tracker_library_causes_a_one_line_error_with_the_pip_command(
    folder, nnictl, monkeypatch, kind
):
    for name in [
        each for each in sys.modules if each.partition(".")[0] == kind or each.endswith(f"trackers.{kind}")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, kind, None)

    code, out, err = nnictl("experiment", "export", "-t", kind, "-f", "target")

    assert (code, out) == (1, "")
    assert f"the package {kind} is not installed; run `pip install 'trial-keeper[{kind}]'`" in err


def test_an_export_to_tensorboard_skips_and_counts_trials_that_have_not_started(folder, nnictl):
    pytest.importorskip("tensorboard")
    waiting = trial(0, TrialState.WAITING)
    waiting.run.started_at_s = None
    store(folder, waiting)

    code, out, err = nnictl("experiment", "export", "-t", "tensorboard", "-f", "board")

    assert (code, out) == (0, "INFO: Wrote 0 runs to board; `tensorboard --logdir board` shows them\n")
    assert "INFO: 1 trials have not started; repeat the command to add them" in err
