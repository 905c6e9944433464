"""The web page's views of an experiment: configuration, jobs and storage."""

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
import yaml
from attempts import attempt_id
from deadlines import DEADLINE_S
from made_experiment import Played, made_experiment, made_trial

from nni_manager.client.watch import trial_cells
from nni_manager.config.cluster import HIDDEN
from nni_manager.config.model import UserClass
from nni_manager.domain.attempts import RegisteredAttempt
from nni_manager.domain.events import ParametersSuggested
from nni_manager.domain.learning_curve import StoredMark
from nni_manager.domain.message_summary import how_it_ended, message_summary
from nni_manager.domain.provenance import AttemptEnvironment, CodeVersion
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from nni_manager.domain.usage import PeakUsage
from nni_manager.engine.profiles import configuration_view, metadata_view, profile_view
from nni_manager.engine.serializers import (
    attempts_view,
    jobs_view,
    message_of,
    ms,
    provenance_view,
    summary_view,
    trial_view,
    usage_samples_view,
    usage_view,
    whole_trial_view,
)
from nni_manager.engine.snapshot import ExperimentSnapshot, KeeperSeen
from nni_manager.engine.trial_rows import row_view
from nni_manager.store.rows import SeenJob, UsageRow
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.training_services.openpai.section import PaiConfig
from nni_manager.training_services.remote.section import RemoteMachine, RemoteSection
from nni_manager.web import backend_reads, experiment_routes
from nni_manager.web.api import API_ROOT, ManagerApi
from nni_manager.web.session_auth import SessionAuth
from trial_keeper.wire.messages import AttemptKey, GpuUsage, Stream, Usage


@pytest.fixture
def played(tmp_path):
    return Played(
        made_experiment(
            tmp_path, 0, tuner={"builtinTunerName": "TPE", "classArgs": {"constant_liar_type": "min"}}
        ).folder
    )


@contextlib.asynccontextmanager
async def client_of(served):
    session_auth = SessionAuth(b"secret", "TESTEXPT", served.folder.ended_sessions)
    app = ManagerApi(served, WebServerOptions(require_token=True), 1, session_auth, lambda: None).app()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url=f"http://127.0.0.1{API_ROOT}",
        headers={"Authorization": f"Bearer {session_auth.token}"},
        trust_env=False,
    ) as client:
        yield client


def test_configuration_and_profile_contain_no_credentials(played):
    config = played.snapshot().config.replace(
        training_service="pai",
        cluster=PaiConfig("pai.example", "ada", "the-token", "the-password", Path("/mnt"), "/mnt", None, None, None, None, None,
                      None, Path("/home/ada/job.yml"), "secrets: {key: the-secret}"),
    )  # fmt: skip
    shown = configuration_view(dataclasses.replace(played.snapshot(), config=config))
    profiles = [
        profile_view(dataclasses.replace(played.snapshot(), config=config.replace(file_schema=schema)))
        for schema in ("v1", "v2")
    ]
    assert profiles[1]["params"]["trainingService"]["host"] == "pai.example"
    for secret in ("the-token", "the-password", "the-secret"):
        assert secret in config.to_json()
        assert secret not in json.dumps([shown, *profiles])
    document = yaml.safe_load(shown["text"])
    assert document["trialConcurrency"] == 2
    assert document["pai"]["user"] == "ada"
    assert document["pai"]["token"] == HIDDEN
    assert document["tuner"]["classArgs"] == {"constant_liar_type": "min"}
    assert shown["searchSpace"] == {"x": {"_type": "uniform", "_value": [0, 1]}}


def test_configuration_and_profile_contain_no_passwords_of_machines(played):
    machines = (
        RemoteMachine("a.example", 22, "ada", "the-password"),
        RemoteMachine(
            "b.example", 2222, "ada", ssh_key_file="/home/ada/key", ssh_passphrase="the-passphrase"
        ),
    )
    config = played.snapshot().config.replace(training_service="remote", cluster=RemoteSection(machines))
    shown = configuration_view(dataclasses.replace(played.snapshot(), config=config))
    profile = profile_view(dataclasses.replace(played.snapshot(), config=config.replace(file_schema="v2")))
    for secret in ("the-password", "the-passphrase"):
        assert secret in config.to_json()
        assert secret not in json.dumps([shown, profile])
        assert secret not in repr(config)
    first, second = yaml.safe_load(shown["text"])["remote"]["machines"]
    assert (first["password"], second["sshPassphrase"]) == (HIDDEN, HIDDEN)
    listed = profile["params"]["trainingService"]["machineList"]
    assert listed[0] == {
        "host": "a.example",
        "port": 22,
        "user": "ada",
        "maxTrialNumberPerGpu": 1,
        "useActiveGpu": False,
    }
    assert (listed[1]["port"], listed[1]["sshKeyFile"]) == (2222, "/home/ada/key")


SHARED_PARAMS = {
    "experimentName": "tests",
    "trialConcurrency": 2,
    "maxTrialRetry": 0,
    "maxPreemptions": 100,
    "lostNodeTimeout": 300.0,
    "debug": False,
    "versionCheck": True,
    "logLevel": "info",
    "logCollection": "none",
    "reuseIdleTimeout": 600.0,
    "maxTrialsPerJob": 0,
    "searchSpace": {"x": {"_type": "uniform", "_value": [0, 1]}},
}


@pytest.mark.parametrize("fail_fast", [False, 3])
def test_a_profile_has_the_keys_of_the_schema_of_its_experiment_file(tmp_path, fail_fast):
    experiment = made_experiment(
        tmp_path,
        0,
        maxExecDuration="2h",
        failFast=fail_fast,
        tuner={"builtinTunerName": "TPE", "classArgs": {"constant_liar_type": "min"}},
        assessor={"builtinAssessorName": "Medianstop", "classArgs": {"optimize_mode": "minimize"}},
    )
    snapshot = ExperimentSnapshot.stored(experiment.folder)
    command, shared = snapshot.config.trial_command, SHARED_PARAMS | {"failFast": fail_fast}
    in_v2 = dataclasses.replace(snapshot, config=snapshot.config.replace(file_schema="v2"))
    assert profile_view(snapshot)["params"] == shared | {
        "authorName": "tests",
        "description": None,
        "maxExecDuration": 7200.0,
        "maxTrialNum": 1,
        "maxTrialDuration": None,
        "nniManagerIp": None,
        "trainingServicePlatform": "local",
        "tuner": {"builtinTunerName": "TPE", "classArgs": {"constant_liar_type": "min"}},
        "trial": {"command": command, "codeDir": str(experiment.code), "gpuNum": None},
    }
    of_trials = {"trialCommand": command, "trialCodeDirectory": str(experiment.code)}
    assert profile_view(in_v2)["params"] == shared | of_trials | {
        "experimentType": "hpo",
        "maxExperimentDuration": 7200.0,
        "maxTrialNumber": 1,
        "useAnnotation": False,
        "experimentWorkingDirectory": str(tmp_path / "experiments"),
        "tuner": {"name": "TPE", "classArgs": {"constant_liar_type": "min"}},
        "assessor": {"name": "Medianstop", "classArgs": {"optimize_mode": "minimize"}},
        "trainingService": {"platform": "local", "reuseMode": False} | of_trials,
    }


def test_the_profile_of_an_experiment_with_a_custom_tuner_contains_the_class_and_its_folder(played):
    own = UserClass("mine.Tuner", "/home/ada/tuner")
    config = played.snapshot().config
    tuner = dataclasses.replace(config.tuner, name="mine.Tuner", class_args={"speed": 2}, own=own)
    config = config.replace(file_schema="v2", tuner=tuner)
    profile = profile_view(dataclasses.replace(played.snapshot(), config=config))
    assert profile["params"]["tuner"] == {
        "className": "mine.Tuner",
        "codeDirectory": "/home/ada/tuner",
        "classArgs": {"speed": 2},
    }


def test_only_an_ended_experiment_has_an_end_time(played, tmp_path):
    # A resumed experiment keeps the time of its previous end until it ends again.
    resumed = dataclasses.replace(played.snapshot(), ended_at_s=12.5)
    ended = ExperimentSnapshot.stored(made_experiment(tmp_path / "ended", 1).folder)
    for view in (profile_view, metadata_view, summary_view):
        assert view(resumed).get("endTime") is None
        assert view(ended)["endTime"] == ms(ended.ended_at_s)
    assert (metadata_view(ended)["succeededCount"], metadata_view(ended)["failedCount"]) == (1, 0)
    assert metadata_view(resumed)["succeededCount"] == 0


def test_the_configuration_view_has_the_newest_code_version_and_the_usual_order_of_keys(played):
    versions = (CodeVersion(1.0, "d1", None, None), CodeVersion(2.0, "d2", "abc", is_dirty=True))
    shown = configuration_view(dataclasses.replace(played.snapshot(), code=versions))
    assert shown["trial"]["codeVersion"] == {
        "since": 2000, "digest": "d2", "gitCommit": "abc", "isDirty": True,
    }  # fmt: skip
    document = yaml.safe_load(shown["text"])
    assert [*document][:3] == ["authorName", "experimentName", "trialConcurrency"]
    internal = {"schema", "searchSpaceRaw", "searchSpaceRevision", "expansions", "warnings"}
    assert not internal & document.keys()


def test_the_view_of_a_job_contains_its_keepers_and_times_and_a_link_to_the_cluster(played):
    snapshot = dataclasses.replace(
        played.snapshot(),
        keepers_of=lambda job_id: [KeeperSeen("main-0", "0.6.0")] if job_id == "env-1" else [],
        link_of=lambda job_id: f"https://pai.example/{job_id}",
    )
    shown = jobs_view(snapshot, [SeenJob("env-1", 2.0, None), SeenJob("env-0", 1.0, 1.5)])
    assert [job["link"] for job in shown] == ["https://pai.example/env-1", "https://pai.example/env-0"]
    assert shown[0]["keepers"] == [{"task": "main-0", "version": "0.6.0"}]
    assert (shown[1]["state"], shown[1]["created"], shown[1]["ended"]) == ("ended", 1000, 1500)
    of_a_view = jobs_view(dataclasses.replace(snapshot, is_view=True), [SeenJob("env-1", 2.0, None)])
    assert of_a_view[0]["state"] == "unknown"


def test_a_running_trial_shows_cluster_warnings_and_the_time_since_the_keepers_last_message(played):
    snapshot = played.snapshot()
    trial = Trial("t", 0, {"x": 1}, {}, 1.0, job_id="job")
    assert message_of(dataclasses.replace(snapshot, warning_of=lambda _: "node n1 is down"), trial) == ""
    trial.began(AttemptKey("t", attempt_id(0), "main-0"), 2.0, 2.0)
    assert message_of(snapshot, trial) == ""
    warned = dataclasses.replace(snapshot, warning_of={"job": "node n1 is down"}.get, now_s=99.0)
    assert message_of(warned, trial) == "node n1 is down"
    warned.experiment.transports.track("job", 1.0)
    warned.experiment.transports.connected("job", "main-0", 61.0)
    assert message_of(warned, trial) == "node n1 is down; its keeper has been silent for 38 s"
    shown = trial_view(warned, trial)
    assert "(node n1 is down; its keeper has been silent for 38 s)" in trial_cells(shown)[2]


KEY = AttemptKey("t", attempt_id(0), "main-0")


def test_the_view_of_a_trial_has_the_fields_that_nni_returns(played):
    snapshot = dataclasses.replace(played.snapshot(), link_of=lambda job_id: f"https://pai.example/{job_id}")
    trial = Trial("t", 7, {"x": 1}, {}, 1.0, job_id="job")
    shown = trial_view(snapshot, trial)
    assert shown["link"] == "https://pai.example/job"
    assert "finalMetricData" not in shown
    assert shown["logPath"] == f"{snapshot.folder.workspace.trials}/t"
    parameters = {"parameter_id": 7, "parameters": {"x": 1}, "parameter_index": 0}
    assert [*map(json.loads, shown["hyperParameters"])] == [parameters | {"parameter_source": "algorithm"}]
    trial = Trial("t", 7, {"x": 1}, {}, 1.0, None, is_customized=True, run=TrialRun(final="0.5", value=0.5))
    shown = trial_view(snapshot, trial)
    assert shown["link"] is None
    assert [*map(json.loads, shown["hyperParameters"])] == [parameters | {"parameter_source": "customized"}]
    assert shown["finalMetricData"] == [
        {"trialJobId": "t", "parameterId": "7", "type": "FINAL", "sequence": 0, "data": "0.5"}
    ]


def test_the_usage_view_of_a_trial_contains_its_peak_usage_and_during_its_run_also_the_latest_usage():
    latest = Usage(KEY, 12.5, 1000, 10, (GpuUsage(1, 50.0, 2**30),))
    shown = {
        "cpuPercent": 12.5,
        "rssBytes": 1000,
        "diskBytes": 10,
        "gpus": [{"index": 1, "utilisationPercent": 50.0, "memoryUsedBytes": 2**30}],
    }
    trial = Trial("t", 0, {}, {}, 1.0, job_id="job")
    assert usage_view(trial) is None
    trial.run.peak_usage = PeakUsage(99.0, 2000, 20)
    peak = {"cpuPercent": 99.0, "rssBytes": 2000, "diskBytes": 20, "gpus": []}
    assert usage_view(trial) == {"peak": peak, "latest": None}
    trial.run.latest_usage = latest
    assert usage_view(trial) == {"peak": peak, "latest": shown}
    trial.state = TrialState.SUCCEEDED
    assert usage_view(trial) == {"peak": peak, "latest": None}
    sample = {"attempt": 3, "task": "main-0", "timestamp": 2500}
    assert usage_samples_view([(3, UsageRow(latest, 2.5))]) == [sample | shown]


def test_a_trial_is_shown_with_a_checkpoint_if_it_saved_one_or_continues_another_trial(played):
    def has_checkpoint(marks=(), continues=None):
        trial = Trial("t", 0, {}, {}, 1.0, job_id="job", continues=continues)
        return whole_trial_view(played.snapshot(), trial, [], marks)["hasCheckpoint"]

    mark = StoredMark(0, KEY.attempt_id, KEY.task, 10, "000001")
    assert not has_checkpoint()
    assert has_checkpoint(marks=[mark])
    assert has_checkpoint(continues="t0")


def test_each_attempt_of_a_trial_lists_its_own_tasks_with_the_sizes_of_their_logs():
    attempts = [
        (RegisteredAttempt(AttemptKey("t", attempt_id(number), task), number), {Stream.STDOUT: size})
        for number, task, size in ((0, "ps-0", 3), (0, "worker-0", 4), (1, "worker-0", 5))
    ]

    def shown(number, task, size):
        return {"task": task, "id": attempt_id(number), "streams": {"stdout": size}}

    assert attempts_view(attempts) == [
        {"attempt": 0, "tasks": [shown(0, "ps-0", 3), shown(0, "worker-0", 4)]},
        {"attempt": 1, "tasks": [shown(1, "worker-0", 5)]},
    ]


def test_the_provenance_of_a_trial_is_the_code_at_its_start_and_the_environment_of_each_attempt(played):
    versions = (CodeVersion(10.0, "d1", "abc", is_dirty=False), CodeVersion(20.0, ""))
    snapshot = dataclasses.replace(played.snapshot(), code=versions)
    trial = Trial("t", 0, {}, {}, 1.0, job_id="job", run=TrialRun(started_at_s=15.0))
    environments = [AttemptEnvironment(0, "main-0", "host-1", "", "3.11.2", "ab")]
    first = {"since": 10_000, "digest": "d1", "gitCommit": "abc", "isDirty": False}
    assert provenance_view(snapshot, trial, environments) == {
        "code": first,
        "attempts": [
            {
                "attempt": 0,
                "task": "main-0",
                "host": "host-1",
                "node": None,
                "python": "3.11.2",
                "packages": "ab",
            }
        ],
    }
    newest = {"since": 20_000, "digest": None, "gitCommit": None, "isDirty": None}
    trial.run.started_at_s = 25.0
    assert provenance_view(snapshot, trial, []) == {"code": newest, "attempts": []}
    trial.run.started_at_s = 5.0  # the start is before the first record of a code version
    assert provenance_view(snapshot, trial, []) == {"code": None, "attempts": []}


def test_the_view_of_a_trial_contains_the_values_of_its_objectives_and_the_violated_constraints(tmp_path):
    def shown(result, **config):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))

        def make_trial(number, now_s):
            trial = made_trial(number, now_s)
            trial.run.final = None if result is None else json.dumps(result)
            return trial

        snapshot = ExperimentSnapshot.stored(made_experiment(folder, 1, make_trial, **config).folder)
        return trial_view(snapshot, *snapshot.experiment.trials.values())

    limited = {"constraints": [{"metric": "ms", "at_most": 15}]}
    two = {"objectives": [{"metric": "acc", "mode": "maximize"}, {"metric": "ms", "mode": "minimize"}]}
    one = {"objectives": two["objectives"][:1]}
    found = shown({"acc": 0.5, "ms": 20}, **two, **limited)
    assert (found["values"], found["violates"]) == ([0.5, 20], ["ms ≤ 15"])
    found = shown({"acc": 0.5, "ms": 10}, **two, **limited)
    assert (found["values"], "violates" in found) == ([0.5, 10], False)
    found = shown({"acc": 0.5, "ms": 20}, **one, **limited)
    assert ("values" in found, found["violates"]) == (False, ["ms ≤ 15"])
    for found in (shown(0.5), shown(None, **two, **limited)):
        assert not {"values", "violates"} & found.keys()


def test_a_table_row_marks_a_result_that_violates_a_constraint():
    trial = Trial("t", 0, {}, {}, 1.0, job_id="job", run=TrialRun(final="0.5", value=0.5))
    assert "infeasible" not in row_view(trial)
    trial.run.is_feasible = False
    assert row_view(trial)["infeasible"] is True


def test_a_storage_that_does_not_respond_delays_no_other_request(played, monkeypatch):
    monkeypatch.setattr(backend_reads, "STORAGE_TIMEOUT_S", 0.2)
    there = threading.Event()
    monkeypatch.setattr(experiment_routes.trial_logs, "attempts_of", lambda *_: there.wait(DEADLINE_S) and [])
    played.apply(ParametersSuggested("t0", 0, {"x": 1}, {}, 1.0))

    async def ask():
        async with client_of(played) as client:
            hanging = await client.get("/trials/t0/attempts")
            assert hanging.status_code == 503
            assert hanging.json()["error"] == (
                "cannot read the files of the trial: no answer within 0 s; check the shared storage, or try again"
            )
            assert (await client.get("/summary")).status_code == 200
            there.set()
            assert (await client.get("/trials/t0/attempts")).json() == []

    asyncio.run(ask())


def test_the_importance_of_parameters_is_computed_once_for_unchanged_results(played, monkeypatch):
    evaluated = []
    importance_of = experiment_routes.importance_of
    monkeypatch.setattr(
        experiment_routes,
        "importance_of",
        lambda *given, **more: evaluated.append(given[1]) or importance_of(*given, **more),
    )

    async def ask():
        async with client_of(played) as client:
            answers = await asyncio.gather(*(client.get("/importance") for _ in range(3)))
            assert all(answer.json()["why"].startswith("0 trials have") for answer in answers)
            # Two pages show different metrics and alternate their requests. Nevertheless, each metric is evaluated only once.
            for metric in ("loss", "default", "loss"):
                await client.get(f"/importance?metric={metric}")
            assert evaluated == ["default", "loss"]
            others = [f"m{number}" for number in range(experiment_routes.MAX_IMPORTANCES)]
            for metric in (*others, others[0], "loss"):
                await client.get(f"/importance?metric={metric}")
            assert evaluated == ["default", "loss", *others, "loss"], "only the last ones are kept"

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("reason", "message", "line"),
    [
        ("non-zero exit", "Traceback:\n  x\nValueError: y\n", "ValueError: y"),
        ("job lost", "the cluster lost it\nlast words", "the cluster lost it"),
        ("", "", ""),
        ("signal", " \n ", ""),
    ],
)
def test_the_summary_of_a_trial_message_is_its_most_informative_line(reason, message, line):
    assert message_summary(reason, message) == line


@pytest.mark.parametrize(
    ("reason", "exit_code", "how"),
    [
        ("signal", 137, "signal 9 (SIGKILL)"),
        ("signal", 128 + 99, "signal 99"),
        ("non-zero exit", 1, "exit code 1"),
        ("non-zero exit", 143, "exit code 143 (128 + SIGTERM)"),
        ("job lost", 137, "job lost"),
    ],
)
def test_the_text_about_a_trial_end_contains_the_exit_code_or_the_signal_or_the_reason(
    reason, exit_code, how
):
    assert how_it_ended(reason, exit_code) == how


@pytest.mark.parametrize(
    ("final", "metrics"),
    [
        (
            '{"default": 0.5, "loss": 2, "notes": "x", "ok": true, "bad": NaN, "deep": {"a": 1}}',
            {"loss": 2.0, "ok": 1.0},
        ),
        ('{"loss": 1e-3, "huge": ' + "9" * 400 + "}", {"loss": 0.001}),
        ("0.5", None),
        ("[1, 2]", None),
        ("{broken", None),
        (json.dumps({f"m{number}": number for number in range(30)}), {f"m{n}": float(n) for n in range(20)}),
    ],
)
def test_a_table_row_has_up_to_twenty_numeric_metrics_besides_the_default_metric(final, metrics):
    trial = Trial("t0", 0, {}, {}, 1.0, "t0", TrialState.SUCCEEDED, run=TrialRun(attempt=0))
    trial.run.final = final
    assert row_view(trial).get("metrics") == metrics


@pytest.mark.parametrize(
    ("final", "shown"),
    [
        ({"predictions": [0.5] * 100_000, "loss": 2}, None),
        ({f"m{number}": number for number in range(21)}, {f"m{number}": number for number in range(20)}),
        ({f"text{number}": "x" for number in range(30)} | {"loss": 2}, {"loss": 2}),
    ],
)
def test_a_shortened_row_of_a_trial_is_marked_as_cut_and_a_whole_row_contains_all_numbers(final, shown):
    trial = Trial("t0", 0, {"prompt": "word " * 100}, {}, 1.0, "t0", TrialState.SUCCEEDED, run=TrialRun())
    trial.run.final = json.dumps(final)
    whole = row_view(trial, is_whole=True)
    assert "cut" not in whole
    assert whole["parameters"] == trial.parameters
    assert whole["metrics"] == {name: each for name, each in final.items() if isinstance(each, int)}
    trial.parameters = {}
    row = row_view(trial)
    assert row.get("metrics") == shown
    assert row.get("cut", False) == (shown != whole["metrics"])


def test_the_metrics_of_the_objectives_come_first_in_a_table_row():
    final = {f"other{number}": number for number in range(30)} | {"acc": 0.5, "ms": 7, "mb": 9}
    trial = Trial("t0", 0, {}, {}, 1.0, "t0", TrialState.SUCCEEDED, run=TrialRun(attempt=0))
    trial.run.final, trial.metrics = json.dumps(final), ("acc", "ms", "mb")
    found = row_view(trial)["metrics"]
    assert len(found) == 20
    assert [*found.items()][:4] == [("acc", 0.5), ("ms", 7), ("mb", 9), ("other0", 0)]


_OF_PYENV = """\
pyenv: python3.5: command not found

The `python3.5' command exists in these Python versions:
  3.5.3

Note: See 'pyenv help global' for tips on allowing both
      python2 and python3 to be found at the same time.
"""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (_OF_PYENV, "pyenv: python3.5: command not found"),
        ("bash: line 1: trian.py: command not found\nbye\n", "bash: line 1: trian.py: command not found"),
        ("sh: 1: trian.py: not found\n", "sh: 1: trian.py: not found"),
        ("env: 'python4': No such file or directory\n", "env: 'python4': No such file or directory"),
        ("a: not found\nwent on\nb: not found\nbye\n", "b: not found"),
        ("step 1\nstep 2\n", "step 2"),
    ],
)
def test_the_summary_of_a_trial_message_is_the_line_that_names_the_missing_command(message, line):
    assert message_summary("non-zero exit", message, 127).partition(";")[0] == line
    assert message_summary("non-zero exit", message, 1) == message.splitlines()[-1].strip()


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("./crlf.sh", "the script has Windows line ends; "),
        ("bash crlf.sh", "the script has Windows line ends; "),
        ("./crlf.py", "the script has Windows line ends; "),
        (
            "./crlf_of_bash.sh",
            "the first line of the script names a program that does not exist; fix it or, if",
        ),
        ("./without.sh", "the first line of the script names a program that does not exist; "),
        ("conda activate torch && python3 train.py", "a trial's shell does not read ~/.bashrc; "),
        ("python9 train.py", "it is not on the PATH of the trial; "),
        ("sh -c 'python9 train.py'", "it is not on the PATH of the trial; "),
        ("./plain.py", "make the file executable with `chmod +x`, or name its interpreter"),
        ("python3 missing.py", ""),
        ("echo 'ada: not found' >&2; exit 3", ""),
    ],
)
def test_the_summary_of_a_trial_message_has_a_hint_if_the_command_cannot_run(tmp_path, command, hint):
    for name, text in {
        "crlf.sh": "#!/usr/bin/env bash\r\ncd .\r\npython3 train.py\r\n",
        "crlf_of_bash.sh": "#!/bin/bash\r\npython3 train.py\r\n",
        "without.sh": "#!/opt/missing/python3\nprint(1)\n",
        "crlf.py": "#!/usr/bin/env python3\r\nprint(1)\r\n",
        "plain.py": "print(1)\n",
    }.items():
        (tmp_path / name).write_bytes(text.encode())
        (tmp_path / name).chmod(0o755 if name != "plain.py" else 0o644)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    _, _, found = message_summary("non-zero exit", done.stderr, done.returncode).partition("; ")
    assert found.startswith(hint)
    assert bool(found) == bool(hint)


def test_the_configuration_shows_non_ascii_letters_unescaped(played):
    config = played.snapshot().config.replace(trial_command="python größe.py")
    snapshot = dataclasses.replace(played.snapshot(), config=config)
    assert "größe.py" in configuration_view(snapshot)["text"]
