"""Rules for experiments on every training service, with a real engine and real keepers.

Rules for jobs are in test_platform_jobs.py.
"""

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from amounts import amount
from deadlines import DEADLINE_S, scaled_s

pytest.importorskip("kubernetes")

from platforms import ONE_OF_EACH_KIND, PLATFORMS, a_platform
from real_experiment import RealExperiment, a_manager_here, until, values

from nni_manager.domain import stop_escalation
from nni_manager.engine import engine as engine_module
from nni_manager.engine import job_submission, submission_gate
from nni_manager.engine.serializers import trial_view
from nni_manager.engine.trial_logs import read_range
from nni_manager.store import leftover_jobs
from nni_manager.support.leftovers import processes_of
from nni_manager.training_services.kubernetes import resource_calls
from trial_keeper.wire.messages import Stream

# The trials with numbers 2 and 3 wait for a signal, and the trial with number 1 fails.
TRAIN = """\
import signal, sys
import nni_sdk
x = nni_sdk.get_next_parameter()["x"]
number = nni_sdk.get_sequence_id()
print("trial", number, flush=True)
nni_sdk.report_intermediate_result(x / 2)
if number == 1:
    print("no data in /data", file=sys.stderr)
    sys.exit(7)
if number in (2, 3):
    signal.pause()
nni_sdk.report_final_result(x)
"""
# Each trial waits until a file with the trial's number as its name exists.
GATED = """\
import os, time
import nni_sdk
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_intermediate_result(x / 2)
while not os.path.exists(f"{gates}/{{nni_sdk.get_sequence_id()}}"):
    time.sleep(0.02)
nni_sdk.report_final_result(x)
"""

# The first trial saves a checkpoint after each step, and fails after its second step.
FAILS_AFTER_A_CHECKPOINT = """\
import pathlib
import nni_sdk
nni_sdk.get_next_parameter()
path = nni_sdk.load_checkpoint()
first = int(pathlib.Path(path, "step").read_text()) if path else 0
for step in range(first, 4):
    nni_sdk.report_intermediate_result(step)
    nni_sdk.save_checkpoint(lambda folder: pathlib.Path(folder, "step").write_text(str(step + 1)))
    pathlib.Path(nni_sdk.checkpoint_dir(), "own").touch()
    if step == 1 and not path:
        raise SystemExit(1)
nni_sdk.report_final_result(first)
"""


class Running:
    """An experiment with a running manager."""

    def __init__(self, platform, engine):
        self.platform, self.engine = platform, engine

    def trials(self):
        """All trials in the format of the HTTP API, in order."""
        snapshot = self.engine.snapshot()
        return [trial_view(snapshot, trial) for trial in self.engine.experiment.trials.values()]

    def statuses(self):
        return [trial["status"] for trial in self.trials()]

    async def has(self, *statuses):
        await until(lambda: self.statuses() == [*statuses], f"the trials are {statuses}", DEADLINE_S)

    async def has_intermediates(self, sequence_id):
        """Wait until the trial runs and its first intermediate result is stored."""
        await until(
            lambda: (
                len(found := self.trials()) > sequence_id and found[sequence_id]["intermediateCount"] == 1
            ),
            f"trial {sequence_id} reports",
            DEADLINE_S,
        )

    async def is_terminal(self, state="DONE"):
        await until(lambda: self.engine.experiment.state.value == state, f"it is {state}", DEADLINE_S)
        await self.engine.until_stopped()

    @property
    def problem(self):
        return self.engine.snapshot().problem


def new_experiment(platform, train, reuse=False, **config):
    experiment = RealExperiment(
        platform.folder / "experiment", train, **(platform.config(reuse) | {"trialConcurrency": 1} | config)
    )
    experiment.create()
    return experiment


async def manage(platform, experiment, play):
    """Run a manager of the experiment until `play` returns."""
    async with a_manager_here(experiment, platform.factory(experiment)) as engine:
        await play(Running(platform, engine))


def run(work):
    asyncio.run(asyncio.wait_for(work, scaled_s(150)))


@pytest.fixture
def platform(request, tmp_path, monkeypatch):
    with a_platform(request.param, tmp_path, monkeypatch) as platform:
        yield platform


# After its start, a trial behaves the same on all platforms of a kind. So the short form of these tests uses one platform of each
# kind. Tests of single platforms are in test_platform_jobs.py.
on_each_kind_of_platform = pytest.mark.parametrize(
    "platform", amount(ONE_OF_EACH_KIND, tuple(PLATFORMS)), indirect=True
)


# ---- a complete experiment whose trials end in different ways


# The short form of these tests omits some platforms. For the omitted platforms, tests/e2e has tests that run whole experiments.
@pytest.fixture(scope="module", params=amount((*ONE_OF_EACH_KIND, "slurm-over-ssh"), tuple(PLATFORMS)))
def done(request, tmp_path_factory):
    """Run this experiment. Returns the data that it shows and stores."""
    folder = tmp_path_factory.mktemp("platform")
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        a_platform(request.param, folder, monkeypatch) as platform,
    ):
        experiment = new_experiment(platform, TRAIN, maxTrialNum=5)
        seen = SimpleNamespace(platform=platform, experiment=experiment)

        async def play(running):
            await running.has_intermediates(2)
            seen.at_concurrency_1 = running.statuses()
            await running.engine.commands.update("TRIAL_CONCURRENCY", {"trialConcurrency": 2})
            await running.has_intermediates(3)
            seen.at_concurrency_2 = running.statuses()
            cancelled, removed = running.trials()[2:4]
            running.engine.stop_trial(cancelled["id"])
            await running.has("SUCCEEDED", "FAILED", "USER_CANCELED", "RUNNING", "SUCCEEDED")
            platform.remove(removed["id"])
            await running.is_terminal()
            seen.trials = running.trials()
            await platform.is_clean()

        run(manage(platform, experiment, play))
        yield seen


def test_each_trial_has_its_own_job_and_a_final_status(done):
    assert [trial["status"] for trial in done.trials] == [
        *("SUCCEEDED", "FAILED", "USER_CANCELED", "FAILED", "SUCCEEDED")
    ]
    assert [trial["jobId"] for trial in done.trials] == [trial["id"] for trial in done.trials]
    assert [trial["attempt"] for trial in done.trials] == [0] * 5


def test_the_number_of_running_trials_is_limited_by_the_current_concurrency(done):
    assert done.at_concurrency_1 == ["SUCCEEDED", "FAILED", "RUNNING"]
    assert done.at_concurrency_2 == ["SUCCEEDED", "FAILED", "RUNNING", "RUNNING"]


def test_every_metric_is_stored_once_and_the_final_metric_becomes_the_result_of_its_trial(done):
    for trial in done.trials:
        x, has_result = trial["parameters"]["x"], trial["status"] == "SUCCEEDED"
        rows = done.experiment.rows(trial["id"])
        assert values(rows) == ([x / 2, x] if has_result else [x / 2])
        assert [row.is_final for row in rows] == ([False, True] if has_result else [False])
        assert trial["value"] == (x if has_result else None)


def test_a_failed_trial_shows_its_exit_code_and_stderr(done):
    failed = done.trials[1]
    assert (failed["reason"], failed["exitCode"]) == ("non-zero exit", 7)
    assert "no data in /data" in failed["message"]


def test_stdout_and_stderr_of_each_trial_are_stored(done):
    def log(trial, stream):
        folder = done.experiment.folder
        done.platform.fetch(done.experiment, trial["id"], stream)
        return read_range(folder, trial["id"], stream, first=0, most_bytes=1000).text

    for trial in done.trials:
        assert log(trial, Stream.STDOUT) == f"trial {trial['sequenceId']}\n"
        assert log(trial, Stream.STDERR) == ("no data in /data\n" if trial["sequenceId"] == 1 else "")


def test_a_trial_stopped_by_the_user_is_cancelled(done):
    stopped = done.trials[2]
    assert stopped["reason"] == "stopped by user"
    assert stopped["endTime"] >= stopped["startTime"]


def test_a_trial_fails_with_a_specific_reason_if_another_client_removes_its_job(done):
    removed = done.trials[3]
    assert removed["reason"] == done.platform.removed[1].value
    # If the removal does not kill the keeper, the keeper reports the end of the trial itself. Then the trial has no message about
    # its keeper.
    if done.platform.removal_kills:
        assert "its keeper " in removed["message"]
        assert done.platform.removed_message.rpartition("trial1")[2] in removed["message"]


# ---- an experiment with several managers


@on_each_kind_of_platform
def test_trials_continue_without_a_manager_and_a_new_manager_runs_the_remaining_trials(platform):
    gates = platform.folder / "gates"
    gates.mkdir()
    train = GATED.format(gates=gates)
    experiment = new_experiment(platform, train, trialConcurrency=2, maxTrialNum=4)
    workspace = platform.workspace_of(experiment)

    async def first(running):
        for sequence_id in (0, 1):
            await running.has_intermediates(sequence_id)

    async def second(running):
        assert running.statuses()[1] == "RUNNING"
        await running.has("SUCCEEDED", "RUNNING", "RUNNING")
        await running.has_intermediates(2)
        running.engine.stop()
        await running.is_terminal("STOPPED")
        assert running.statuses() == ["SUCCEEDED", "USER_CANCELED", "USER_CANCELED"]
        await platform.is_clean()
        assert not processes_of(workspace)

    async def third(running):
        await running.is_terminal()
        assert running.statuses() == ["SUCCEEDED", "USER_CANCELED", "USER_CANCELED", "SUCCEEDED"]
        for trial in running.trials():
            x = trial["parameters"]["x"]
            expected = [x / 2, x] if trial["status"] == "SUCCEEDED" else [x / 2]
            assert values(experiment.rows(trial["id"])) == expected
            assert trial["attempt"] == 0
        await platform.is_clean()

    async def work():
        await manage(platform, experiment, first)
        (gates / "0").touch()
        await until(
            lambda: list(workspace.trials.glob("*/attempts/*/*/exit.json")),
            *("the first trial ends without a manager", DEADLINE_S),
        )
        await manage(platform, experiment, second)
        (gates / "3").touch()
        await manage(platform, experiment, third)

    run(work())


@on_each_kind_of_platform
@pytest.mark.parametrize("ends", amount(["by itself"], ["by itself", "on request"]))
def test_a_job_left_on_the_cluster_is_reported_and_removed_by_the_next_manager(platform, monkeypatch, ends):
    """The server is unreachable when the trial ends, so the manager cannot observe the end of the job."""
    platform.needs_a_server_that_stops()
    if ends == "by itself" and not platform.reports_bypass_server:
        pytest.skip(f"{platform.name}: keepers report through the server that is stopped")
    for deadline in ("MARGIN_S", "CLUSTER_REPORT_TIMEOUT_S", "KILLED_TIMEOUT_S", "DRAINED_TIMEOUT_S"):
        monkeypatch.setattr(stop_escalation, deadline, scaled_s(0.5))
    monkeypatch.setattr(engine_module, "MAX_STOP_S", scaled_s(5))
    monkeypatch.setattr(resource_calls, "_LAST_DELETES_S", scaled_s(1))
    gates = platform.folder / "gates"
    gates.mkdir()
    experiment = new_experiment(platform, GATED.format(gates=gates), maxTrialNum=1)

    async def loses_the_server(running):
        engine = running.engine
        engine.experiment.stops.cluster_grace_s = engine.experiment.stops.keeper_grace_s = scaled_s(1)
        await running.has_intermediates(0)
        (job_id,) = engine.experiment.jobs.live
        platform.stop_server()
        if ends == "by itself":
            (gates / "0").touch()
            await running.is_terminal()
            assert running.statuses() == ["SUCCEEDED"]
        engine.stop()
        await engine.until_stopped()
        (message,) = leftover_jobs.read(experiment.folder).values()
        assert f"`{engine.service.removal_command(job_id)}`" in message
        assert message in engine.snapshot().leftovers

    run(manage(platform, experiment, loses_the_server))
    (gates / "0").touch()
    platform.start_server()

    async def removes_it(running):
        await platform.is_clean()
        await running.engine.until_stopped()
        assert leftover_jobs.read(experiment.folder) == {}

    run(manage(platform, experiment, removes_it))


@on_each_kind_of_platform
def test_if_the_user_retries_a_failed_trial_the_new_trial_continues_from_its_checkpoint(platform):
    experiment = new_experiment(platform, FAILS_AFTER_A_CHECKPOINT, maxTrialNum=1)

    async def play(running):
        await running.is_terminal()
        assert running.statuses() == ["FAILED"]
        (failed,) = running.engine.experiment.trials.values()
        await running.engine.commands.retry(failed, from_checkpoint=True)
        await running.has("FAILED", "SUCCEEDED")
        trial = running.trials()[1]
        assert (trial["continues"], trial["value"]) == (failed.trial_id, 2)
        assert values(experiment.rows(trial["id"])) == [2, 3, 2]
        await running.is_terminal()

    run(manage(platform, experiment, play))


@on_each_kind_of_platform
def test_a_reused_job_runs_trials_in_sequence_and_continues_after_a_trial_is_stopped(platform):
    experiment = new_experiment(platform, TRAIN, reuse=True, maxTrialNum=5)

    async def play(running):
        for sequence_id in (2, 3):
            await running.has_intermediates(sequence_id)
            running.engine.stop_trial(running.trials()[sequence_id]["id"])
        await running.is_terminal()
        trials = running.trials()
        assert running.statuses() == ["SUCCEEDED", "FAILED", "USER_CANCELED", "USER_CANCELED", "SUCCEEDED"]
        assert {trial["jobId"] for trial in trials} == {"env-0"}
        for trial in trials:
            assert trial["startTime"] <= trial["endTime"]
            x = trial["parameters"]["x"]
            expected = [x / 2, x] if trial["status"] == "SUCCEEDED" else [x / 2]
            assert values(experiment.rows(trial["id"])) == expected
        await platform.is_clean()

    run(manage(platform, experiment, play))


def with_and_without_reuse(*platforms):
    """Each platform with both; in the short form each with one of the two."""
    pairs = itertools.product(platforms, (False, True))
    short = zip(platforms, itertools.cycle((False, True)), strict=False)
    return pytest.mark.parametrize(("platform", "reuse"), amount([*short], [*pairs]), indirect=["platform"])


@with_and_without_reuse("openpai", "frameworkcontroller", "job", "slurm")
def test_the_restart_of_a_preempted_trial_does_not_count_as_a_retry(platform, reuse):
    gates = platform.folder / "gates"
    gates.mkdir()
    experiment = new_experiment(platform, GATED.format(gates=gates), reuse, maxTrialNum=1, maxTrialRetry=0)

    async def play(running):
        await running.has_intermediates(0)
        platform.preempt(running.trials()[0]["jobId"])
        await until(lambda: running.trials()[0]["preemptions"] == 1, "it is preempted", DEADLINE_S)
        (gates / "0").touch()
        await running.is_terminal()
        (trial,) = running.trials()
        assert (trial["status"], trial["retries"], trial["attempt"]) == ("SUCCEEDED", 0, 1)
        assert "the cluster preempted it; restart 1 of 100" in trial["warning"]
        x = trial["parameters"]["x"]
        assert values(experiment.rows(trial["id"])) == [x / 2, x]
        await platform.is_clean()

    run(manage(platform, experiment, play))


WAITS_FOR_STOP = """
import pathlib, time
import nni_sdk as nni

x = nni.get_next_parameter()["x"]
nni.report_intermediate_result(x)
reason = pathlib.Path("{folder}", "reason")
while not reason.exists():
    if nni.should_stop():
        reason.write_text(nni.stop_reason())
    time.sleep(0.05)
nni.report_final_result(x)
"""


@with_and_without_reuse("frameworkcontroller", "job", "slurm")
def test_a_trial_receives_a_stop_notice_with_the_reason_preempted_when_its_preemption_is_announced(
    platform, reuse
):
    code = WAITS_FOR_STOP.format(folder=platform.folder)
    experiment = new_experiment(platform, code, reuse, maxTrialNum=1, maxTrialRetry=0)

    async def play(running):
        await running.has_intermediates(0)
        platform.announce_preemption(running.trials()[0]["jobId"])
        await running.is_terminal()
        (trial,) = running.trials()
        assert (platform.folder / "reason").read_text() == "preempted"
        assert (trial["status"], trial["retries"], trial["preemptions"]) == ("SUCCEEDED", 0, 1)
        await platform.is_clean()

    run(manage(platform, experiment, play))


# ---- responses of the server to a submission

NOT_ALLOWED = (403, "ForbiddenUserError", "User ada is not allowed to do operation in default")
TOO_LARGE = "cannot ever run this job: one of its tasks needs 99 GPUs, and virtual cluster default has 4"
LIMIT = "frameworks is forbidden: maximum cpu usage per Container is 2, but limit is 99"
QUOTAS = {
    "openpai": (403, "ForbiddenUserError", "the quota of default is used up"),
    "frameworkcontroller": (403, "Forbidden", "frameworks is forbidden: exceeded quota: team, used: 2"),
    "slurm": (1, "", "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"),
}


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    ("platform", "refusal"),
    [
        ("openpai", NOT_ALLOWED),
        ("openpai", (400, "InvalidProtocolError", TOO_LARGE)),
        ("frameworkcontroller", (403, "Forbidden", LIMIT)),
        ("frameworkcontroller", (422, "Invalid", "spec: Invalid value: 99")),
        ("slurm", (1, "", "Invalid qos specification")),
    ],
    indirect=["platform"],
)
def test_an_experiment_fails_if_the_cluster_refuses_three_jobs_in_a_row(platform, refusal, reuse):
    platform.answer_submissions(refusal, 100)
    experiment = new_experiment(platform, TRAIN, reuse, trialConcurrency=2, maxTrialNum=50)

    async def play(running):
        await running.is_terminal("ERROR")
        error = running.engine.experiment.error
        assert error.startswith("cannot submit jobs: the cluster refused 3 jobs in a row, the last one with")
        assert refusal[2] in error
        assert error.endswith("; fix the cause, then run `nnictl resume`")
        trials = running.trials()
        assert 3 <= len(trials) <= 5, "those that existed when the third job was refused"
        for trial in trials:
            assert (trial["status"], trial["reason"]) == ("FAILED", "could not start")
            assert refusal[2] in trial["message"]
        assert not platform.left()

    run(manage(platform, experiment, play))


@pytest.mark.parametrize(("platform", "quota"), QUOTAS.items(), indirect=["platform"])
def test_waiting_trials_show_the_quota_error_and_start_when_the_cluster_accepts_jobs_again(
    platform, quota, monkeypatch
):
    monkeypatch.setattr(job_submission, "FIRST_RESUBMIT_S", 0.05)
    monkeypatch.setattr(submission_gate, "RETRY_S", 0.05)
    platform.answer_submissions(quota, 1000)
    experiment = new_experiment(platform, TRAIN, trialConcurrency=2, maxTrialNum=2)

    async def play(running):
        await until(
            lambda: [quota[2] in trial["message"] for trial in running.trials()] == [True, True],
            "both wait with the reason",
        )
        assert running.statuses() == ["WAITING"] * 2
        assert quota[2] in running.problem
        platform.answer_submissions_well()
        for how in (429, 503, 408, "drop"):
            platform.answer_submissions(how)
        await running.is_terminal()
        assert running.statuses() == ["SUCCEEDED", "FAILED"]

    run(manage(platform, experiment, play))


@pytest.mark.parametrize("platform", ["openpai", "frameworkcontroller"], indirect=True)
def test_an_expired_login_suspends_submissions_until_the_login_is_renewed(platform, monkeypatch):
    monkeypatch.setattr(submission_gate, "RETRY_S", 0.2)
    experiment = new_experiment(platform, TRAIN, trialConcurrency=2, maxTrialNum=2)
    platform.expire_login()

    async def play(running):
        suspended = "submission is suspended until the login is valid"
        await until(lambda: suspended in running.problem, "the problem is shown")
        assert platform.renewal in running.problem
        await until(
            lambda: [platform.renewal in trial["message"] for trial in running.trials()] == [True, True],
            "both wait with the reason",
        )
        assert running.statuses() == ["WAITING"] * 2
        platform.renew_login(experiment)
        await running.is_terminal()
        assert running.statuses() == ["SUCCEEDED", "FAILED"]
        assert running.problem == ""

    run(manage(platform, experiment, play))
