"""An experiment whose jobs are real containers.

The containers mount the shared storage under a different path than the manager.
"""

import asyncio
import secrets

import pytest
from attempts import AttemptNumbers, attempt_id
from container_service import MOUNT, ContainerService
from deadlines import DEADLINE_S, scaled_s
from real_experiment import a_manager_here, until

from nni_manager.store.reader import StoreReader
from nni_manager.store.writer import log_path
from nni_sdk.records import decode
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.reasons import ExitReason

pytestmark = [pytest.mark.any_machine, pytest.mark.containers, pytest.mark.timeout(1000)]

ORDINARY, GREEDY, HANDLES_SIGTERM, KILLED = (0, 1, 5), 2, 3, 4
# The sequence id of a trial selects its behaviour.
TRAIN = f"""
import os, signal, sys, time
print(os.getcwd(), sorted(os.listdir()), flush=True)
print("to stderr", file=sys.stderr, flush=True)
import helper
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
number = int(os.environ["NNI_TRIAL_SEQ_ID"])
if number == {GREEDY}:
    nni.report_intermediate_result("hungry")
    hoard = []
    while True:
        hoard.append(b"x" * 1_000_000)
def stop(*_):
    nni.report_final_result(helper.LAST)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
lines = 40 if number in {ORDINARY} else 10**9
for i in range(lines):
    nni.report_intermediate_result(i)
    print("line", i, flush=True)
    time.sleep(0.02)
nni.report_final_result(x)
"""


# Each trial prints the files and processes that earlier trials have left, and itself leaves files and a process.
REUSED = f"""
import os, subprocess, sys
import nni_sdk as nni
nni.get_next_parameter()
number = int(os.environ["NNI_TRIAL_SEQ_ID"])
def told(pid):
    try:
        with open(f"/proc/{{pid}}/cmdline") as file:
            return file.read().replace("\\0", " ").strip()
    except OSError:  # it ends while we look
        return ""
others = [pid for pid in os.listdir("/proc") if pid.isdecimal() and int(pid) not in (1, os.getpid())]
print(os.getcwd(), sorted(os.listdir()), [told(pid) for pid in others if "sleep" in told(pid)], flush=True)
open("mine", "w").close()
subprocess.Popen(["setsid", "sleep", "1000"])
open(f"/tmp/left-{{number}}", "w").close()
nni.report_intermediate_result(number)
if number == {GREEDY}:
    hoard = []
    while True:
        hoard.append(b"x" * 1_000_000)
nni.report_final_result(number)
"""


class Cluster:
    """The containers of one test."""

    def __init__(self, podman, storage):
        self.podman = podman
        self.storage = storage
        self.prefix = f"trial-keeper-test-{secrets.token_hex(3)}-"

    def service(self, on_job_ended):
        limits = ("--memory=96m", "--memory-swap=96m")
        return ContainerService(self.podman, self.prefix, self.storage, limits, on_job_ended)

    def names(self):
        listing = ("podman", "ps", "--all", "--format", "{{.Names}}", "--filter", f"name=^{self.prefix}")
        return self.podman.run(*listing).split()

    def kill(self, job_id):
        self.podman.run("podman", "kill", "--signal", "KILL", self.prefix + job_id)

    def remove_all(self):
        for name in self.names():
            self.podman.run("podman", "rm", "--force", "--ignore", "--time", "0", name)


@pytest.fixture
def cluster(podman, tmp_path):
    cluster = Cluster(podman, tmp_path / "experiment0" / "experiments")
    yield cluster
    cluster.remove_all()


def by_number(engine):
    return {trial.sequence_id: trial for trial in engine.experiment.trials.values()}


@pytest.mark.smoke
def test_every_metric_of_trials_in_containers_is_stored_even_if_the_trials_fail_or_are_killed(
    a_real_experiment, cluster
):
    experiment = a_real_experiment(
        TRAIN,
        trialConcurrency=2,
        maxTrialNum=6,
        logCollection="http",
        trial={"command": "python3 train.py", "codeDir": "."},
    )
    (experiment.code / "helper.py").write_text("LAST = 99\n")
    (experiment.code / "weights.bin").write_bytes(bytes(1000))
    (experiment.code / ".nniignore").write_text("*.bin\n*.json\nconfig.yml\n")

    def rows(number, engine):
        return experiment.rows(by_number(engine)[number].trial_id)

    async def first_manager():
        async with a_manager_here(experiment, cluster.service) as engine:
            await until(
                lambda: all(
                    number in by_number(engine) and rows(number, engine)
                    for number in (HANDLES_SIGTERM, KILLED)
                ),
                "the trial to be stopped and the one to be killed report",
            )
            await until(lambda: len(cluster.names()) == 2, "the containers of the others have ended")
        return len(cluster.names())

    async def second_manager():
        async with a_manager_here(experiment, cluster.service) as engine:
            trials = by_number(engine)
            stored = {number: len(rows(number, engine)) for number in (HANDLES_SIGTERM, KILLED)}
            await until(lambda: len(engine.keepers) == 2, "their keepers have connected to this manager")
            await until(
                lambda: all(len(rows(number, engine)) > stored[number] for number in stored),
                "both report further metrics",
            )
            engine.stop_trial(trials[HANDLES_SIGTERM].trial_id)
            cluster.kill(trials[KILLED].job_id)
            await asyncio.wait_for(engine.finished.wait(), scaled_s(120))
            await until(lambda: not cluster.names(), "every container has ended", DEADLINE_S)

    assert asyncio.run(first_manager()) == 2, "they must run without a manager"
    asyncio.run(second_manager())

    with StoreReader(experiment.folder.database) as reader:
        trials = {trial.sequence_id: trial for trial in reader.trials()}

    def collected(trial, stream):
        key = AttemptNumbers(experiment.folder.workspace).real(
            AttemptKey(trial.trial_id, attempt_id(0), "main-0")
        )
        return log_path(experiment.folder.collected_logs, key, stream).read_text()

    ends = {number: (trial.state.value, trial.run.reason) for number, trial in trials.items()}
    assert ends == {
        **dict.fromkeys(ORDINARY, ("SUCCEEDED", ExitReason.SUCCEEDED)),
        GREEDY: ("FAILED", ExitReason.OUT_OF_MEMORY),
        HANDLES_SIGTERM: ("USER_CANCELED", ExitReason.STOPPED_BY_USER),
        KILLED: ("FAILED", ExitReason.KEEPER_LOST),
    }
    assert "its keeper ended with exit code 137" in trials[KILLED].run.message
    for number, trial in trials.items():
        stored = [row.value for row in experiment.rows(trial.trial_id)]
        written = decode(experiment.stream(trial.trial_id, Stream.METRICS).read_bytes(), 0).records
        assert stored == [record.value for record in written], f"the rows of trial {number}"
        first = experiment.folder.workspace.attempts_of(trial.trial_id)[0].attempt_id
        code = f"{MOUNT}/TESTEXPT/trials/{trial.trial_id}/attempts/{first}/main-0/code"
        for stream in (Stream.STDOUT, Stream.STDERR):
            assert collected(trial, stream) == experiment.stream(trial.trial_id, stream).read_text()
        assert "the command runs" in collected(trial, Stream.KEEPER)
        out = experiment.stream(trial.trial_id, Stream.STDOUT).read_text()
        assert out.startswith(f"{code} ['.nniignore', 'helper.py', 'train.py']\n")
    for number in ORDINARY:
        assert len(experiment.rows(trials[number].trial_id)) == 41
    assert experiment.rows(trials[HANDLES_SIGTERM].trial_id)[-1].value == "99"


@pytest.mark.parametrize("warm", [{}, {"warmImports": ["json"]}], ids=["plain", "warm"])
def test_a_reused_container_runs_all_trials_and_survives_the_oom_kill_of_a_trial(
    a_real_experiment, cluster, warm
):
    experiment = a_real_experiment(
        REUSED,
        trialConcurrency=1,
        maxTrialNum=6,
        logCollection="http",
        localConfig={"reuse": True},
        trial={"command": "python3 train.py", "codeDir": "."},
        **warm,
    )
    (experiment.code / ".nniignore").write_text("*.json\nconfig.yml\n")

    async def manage():
        async with a_manager_here(experiment, cluster.service) as engine:
            await asyncio.wait_for(engine.finished.wait(), scaled_s(120))
            await until(lambda: not cluster.names(), "the container has ended", DEADLINE_S)

    asyncio.run(manage())
    with StoreReader(experiment.folder.database) as reader:
        trials = {trial.sequence_id: trial for trial in reader.trials()}
        _, jobs = reader.jobs()
    assert len(jobs) == 1
    told_of_tmp = warm_starts = 0
    for number, trial in trials.items():
        expected = (
            ("FAILED", ExitReason.OUT_OF_MEMORY) if number == GREEDY else ("SUCCEEDED", ExitReason.SUCCEEDED)
        )
        assert (trial.state.value, trial.run.reason) == expected, trial.run.message
        assert len(experiment.rows(trial.trial_id)) == (1 if number == GREEDY else 2)
        first = experiment.folder.workspace.attempts_of(trial.trial_id)[0].attempt_id
        code = f"{MOUNT}/TESTEXPT/trials/{trial.trial_id}/attempts/{first}/main-0/code"
        out = experiment.stream(trial.trial_id, Stream.STDOUT).read_text()
        assert out == f"{code} ['.nniignore', 'train.py'] []\n"
        keeper_log = experiment.stream(trial.trial_id, Stream.KEEPER).read_text()
        told_of_tmp += f"left-{number}" in keeper_log
        warm_starts += "a fork of a warm interpreter" in keeper_log
    assert told_of_tmp == len(trials)
    assert bool(warm_starts) == bool(warm)
