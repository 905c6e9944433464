"""A manager is killed at various moments. The next manager has all stored data, runs no trial twice, and reports each result
to the tuner once.

The first manager kills itself inside a function. The second manager records the calls of its tuner.
"""

import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from openpai_here import an_openpai_here
from real_experiment import values, wait_until
from slurm_here import a_slurm_here

from nni_manager.store.lease import read_record
from nni_manager.store.reader import StoreReader
from nni_manager.tuner.registry import make_tuner
from nni_sdk.records import decode
from trial_keeper.wire.messages import Stream

pytestmark = pytest.mark.timeout(240)

TRAIN = """
import os, time
import nni_sdk as nni
with open({ran!r}, "a") as ran:
    ran.write(os.environ["NNI_TRIAL_JOB_ID"] + "\\n")
x = nni.get_next_parameter()["x"]
for i in range(20):
    nni.report_intermediate_result(i)
    time.sleep(0.02)
nni.report_final_result(x)
"""
# This code has an effect only in the manager process. The process kills itself before or after the nth call of one function.
DIES = """
import os, signal, sys
if "-m" in sys.orig_argv and "nni_manager" in sys.orig_argv:
    import asyncio, importlib, inspect
    module, owner, name, when, nth = {moment!r}
    try:
        owner = getattr(importlib.import_module(module), owner) if owner else importlib.import_module(module)
        function, calls = getattr(owner, name), []
    except (ImportError, AttributeError) as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(70)  # Python itself would tell of it and go on

    def die_if(now, number):
        if now == when and number == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    async def slow(*arguments, **named):
        calls.append(1)
        number = len(calls)
        die_if("before", number)
        done = await function(*arguments, **named)
        die_if("after", number)
        return done

    def quick(*arguments, **named):
        calls.append(1)
        number = len(calls)
        die_if("before", number)
        done = function(*arguments, **named)
        die_if("after", number)
        return done

    setattr(owner, name, slow if inspect.iscoroutinefunction(function) else quick)
"""
HEARS = """
import json, sys
if "-m" in sys.orig_argv and "nni_manager" in sys.orig_argv:
    from nni_manager.tuner.optuna_backed import OptunaTuner as Tuner
    restore, tell = Tuner.restore, Tuner.tell_result

    def note(key, value):
        with open({heard!r}, "a") as heard:
            heard.write(json.dumps([key, value]) + "\\n")

    def noted_restore(self, trials):
        for trial in trials:
            if trial.ended:
                note(trial.key, trial.value)
        return restore(self, trials)

    def noted_tell(self, key, result):
        note(key, result.value)
        return tell(self, key, result)

    Tuner.restore, Tuner.tell_result = noted_restore, noted_tell
"""
# This code moves the manager process to namespaces with another host name and boot id, as on another machine with the same
# storage.
ELSEWHERE = """
import sys
if "-m" in sys.orig_argv and "nni_manager" in sys.orig_argv:
    import ctypes, os, socket, subprocess
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000 | 0x04000000):  # CLONE_NEWNS, CLONE_NEWUTS
        print(os.strerror(ctypes.get_errno()), file=sys.stderr, flush=True)
        os._exit(70)
    socket.sethostname("elsewhere")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", {boot_id!r}, "/proc/sys/kernel/random/boot_id"], check=True)
"""
WRITER, TUNER, STORE = (
    "nni_manager.engine.workspace_writer",
    "nni_manager.tuner.optuna_backed",
    "nni_manager.store.writer",
)
LOCAL, INGEST = "nni_manager.training_services.local.client", "nni_manager.engine.keeper_ingest"
# Several managers run in sequence. Each is killed at one of these moments, in this order, so it starts from the state that the
# previous managers have left.
PER_TRIAL = (
    (TUNER, "OptunaTuner", "ask", "after", 2),
    (LOCAL, None, "replace_file", "before", 2),  # this function writes the state file of a keeper
    (INGEST, "KeeperIngest", "end", "before", 1),
    (STORE, "Store", "commit", "after", 5),
)
BEFORE_A_TELL = (TUNER, "OptunaTuner", "tell_result", "before", 2)
REUSED = (
    (LOCAL, "LocalTrainingService", "submit", "after", 1),
    (WRITER, "WorkspaceWriter", "write_trial", "before", 2),
    BEFORE_A_TELL,
)
PAI = "nni_manager.training_services.openpai.rest"
PAI_MOMENTS = {
    "after the submission of a job": (PAI, "OpenPai", "submit", "after", 1),
    "before a tell": BEFORE_A_TELL,
}
SLURM_MOMENTS = {
    "after sbatch": ("nni_manager.training_services.slurm.client", "Slurm", "submit", "after", 1),
    "before a tell": BEFORE_A_TELL,
}


@contextlib.contextmanager
def in_the_manager(experiment, folder, code):
    """Let each manager that starts in this block run `code` first."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    before = experiment.environ.get("PYTHONPATH", "")
    experiment.environ["PYTHONPATH"] = f"{folder}:{before}"
    yield
    experiment.environ["PYTHONPATH"] = before


def die_at(experiment, folder, moment):
    """Run a manager until it kills itself, which may happen during its start."""
    with in_the_manager(experiment, folder / "dies", DIES.format(moment=moment)):
        try:
            experiment.start()
        except AssertionError:
            assert experiment.manager.poll() is not None
    assert experiment.manager.wait(DEADLINE_S) == -signal.SIGKILL, (
        experiment.folder.manager_stderr.read_text()
    )


def assert_nothing_is_lost_or_duplicated(experiment, heard, ran):
    trials = experiment.get("/trials")
    assert [trial["sequenceId"] for trial in trials] == list(range(experiment.config.max_trial_number))
    assert {(trial["status"], trial["attempt"]) for trial in trials} == {("SUCCEEDED", 0)}, trials
    undisturbed = make_tuner(experiment.config)
    for trial in trials:
        asked = undisturbed.ask(trial["sequenceId"]).parameters
        assert (trial["parameters"], trial["value"]) == (asked, asked["x"])
        (key,) = experiment.folder.workspace.attempts_of(trial["id"])
        written = decode(experiment.folder.workspace.attempt(key).stream(Stream.METRICS).read_bytes(), 0)
        rows = experiment.rows(trial["id"])
        assert [(row.record_offset, row.value) for row in rows] == [
            (each.offset, each.value) for each in written.records
        ]
        assert values(rows) == [*range(20), asked["x"]]
        assert trial["intermediateCount"] == 20
    assert Counter(ran.read_text().split()) == Counter(trial["id"] for trial in trials)
    told = [json.loads(line) for line in heard.read_text().splitlines()]
    assert sorted(told) == [[trial["sequenceId"], trial["value"]] for trial in trials]


def resume_and_check(experiment, tmp_path, ran, code=""):
    """Resume the experiment and check its results. `code`: additional code that the next manager runs first."""
    heard = tmp_path / "heard"
    heard.touch()
    with in_the_manager(experiment, tmp_path / "hears", code + HEARS.format(heard=str(heard))):
        experiment.start()
    experiment.wait_for_status("DONE", is_stored=True)
    trials = experiment.config.max_trial_number
    wait_until(lambda: len(heard.read_text().splitlines()) >= trials, "the tuner has received all results")
    with StoreReader(experiment.folder.database) as reader:
        wait_until(lambda: reader.jobs()[0] == [], "the last job has ended")
    assert_nothing_is_lost_or_duplicated(experiment, heard, ran)


@pytest.mark.parametrize(
    ("moments", "reuse"), [(PER_TRIAL, False), (REUSED, True)], ids=["one job each", "reused jobs"]
)
def test_managers_killed_at_several_moments_are_replaced_without_lost_or_duplicate_work(
    a_real_experiment, tmp_path, moments, reuse
):
    """One manager after another runs the experiment, and each is killed at a different moment."""
    ran = tmp_path / "ran"
    ran.touch()
    experiment = a_real_experiment(
        TRAIN.format(ran=str(ran)), trialConcurrency=2, maxTrialNum=6, localConfig={"reuse": reuse}
    )
    for moment in moments:
        die_at(experiment, tmp_path, moment)
    resume_and_check(experiment, tmp_path, ran)


@pytest.mark.parametrize(("moment", "reuse"), list(zip(PAI_MOMENTS, (False, True), strict=True)))
def test_the_next_manager_finds_the_openpai_jobs_of_a_killed_manager(
    a_real_experiment, tmp_path, monkeypatch, moment, reuse
):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    ran = tmp_path / "ran"
    ran.touch()
    (tmp_path / "openpai").mkdir()
    with an_openpai_here(tmp_path / "openpai") as here:
        experiment = a_real_experiment(
            TRAIN.format(ran=str(ran)), trialConcurrency=2, maxTrialNum=3, **here.experiment_keys(reuse=reuse)
        )
        die_at(experiment, tmp_path, PAI_MOMENTS[moment])
        resume_and_check(experiment, tmp_path, ran)
        jobs = [job["name"] for job in here.client().get("/rest-server/api/v2/jobs").json()]
        assert len(jobs) == len(set(jobs)) == (2 if reuse else 3)
        experiment.close()


@pytest.mark.parametrize(("moment", "reuse"), list(zip(SLURM_MOMENTS, (False, True), strict=True)))
def test_a_manager_on_another_machine_finds_the_slurm_jobs_of_a_killed_manager(
    a_real_experiment, tmp_path, moment, reuse
):
    ran = tmp_path / "ran"
    ran.touch()
    with a_slurm_here() as slurm:
        experiment = a_real_experiment(
            TRAIN.format(ran=str(ran)),
            trialConcurrency=2,
            maxTrialNum=3,
            environ=slurm.variables,
            **slurm.experiment_keys(reuse=reuse),
        )
        die_at(experiment, tmp_path, SLURM_MOMENTS[moment])
        boot_id = tmp_path / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        resume_and_check(experiment, tmp_path, ran, ELSEWHERE.format(boot_id=str(boot_id)))
        assert read_record(experiment.folder.path / "owner.lock").holder.host == "elsewhere"
        assert len(slurm.run("squeue", "-h", "--array", "-t", "all", "-o", "%i").split()) == (
            2 if reuse else 3
        )
        wait_until(lambda: not slurm.live(), "no job is left")
        experiment.close()


# The trial waits until the test creates the gate file. On SIGTERM it only creates a file that is named after its sequence id.
SLOW_TO_STOP = """
import os, signal, time
import nni_sdk as nni
signal.signal(signal.SIGTERM, lambda *_: open(f"stopped{nni.get_sequence_id()}", "w").close())
nni.get_next_parameter()
nni.report_intermediate_result(1)
while not os.path.exists("gate"):
    time.sleep(0.02)
nni.report_final_result(2)
if nni.get_sequence_id() < 2:
    raise SystemExit(3)
"""


@pytest.mark.smoke
def test_trials_that_a_manager_was_stopping_when_it_was_killed_end_as_user_canceled(a_real_experiment):
    experiment = a_real_experiment(SLOW_TO_STOP, trialConcurrency=2, maxTrialNum=3)
    experiment.start()
    wait_until(lambda: experiment.row_count() == 2, "both trials report")
    experiment.delete("/experiment")
    with StoreReader(experiment.folder.database) as reader:
        wait_until(
            lambda: [trial.state.value for trial in reader.trials()] == ["STOPPING"] * 2, "both are stopping"
        )
        # Both trials must receive SIGTERM first: a trial that reports its final result before SIGTERM would count as succeeded.
        wait_until(
            lambda: all((experiment.code / f"stopped{number}").exists() for number in (0, 1)),
            "both have received SIGTERM",
        )
        experiment.kill_manager()
        assert reader.experiment().state.value == "STOPPING"
    (experiment.code / "gate").touch()  # the trials end while no manager runs
    experiment.start()
    experiment.wait_for_status("DONE")
    ended = [(trial["sequenceId"], trial["status"]) for trial in experiment.get("/trials")]
    # A trial that a user stopped never counts as failed, so the experiment ends as DONE.
    assert ended == [(0, "USER_CANCELED"), (1, "USER_CANCELED"), (2, "SUCCEEDED")]


QUICK = "import nni_sdk as nni\nnni.report_final_result(nni.get_next_parameter()['x'])\n"


def test_an_ended_experiment_keeps_its_results_when_its_manager_is_killed_and_restarted(a_real_experiment):
    experiment = a_real_experiment(QUICK, maxTrialNum=2)
    experiment.start()
    before = experiment.wait_for_status("DONE")
    trials, metrics = experiment.get("/trials"), experiment.get("/metric-data")
    experiment.kill_manager()
    experiment.start()
    after = experiment.wait_for_status("DONE")
    assert (experiment.get("/trials"), experiment.get("/metric-data")) == (trials, metrics)
    assert after["elapsedS"] == pytest.approx(before["elapsedS"], abs=0.5)
    assert after["best"] == before["best"]


def test_the_duration_of_an_experiment_excludes_time_without_a_manager(
    a_real_experiment,
):
    experiment = a_real_experiment(SLOW_TO_STOP, maxTrialNum=100, trialConcurrency=1, maxExecDuration="1h")
    experiment.start()
    with StoreReader(experiment.folder.database) as reader:
        wait_until(lambda: reader.experiment().active_s > 1, "some time is stored")
        experiment.kill_manager()
        stored_s = reader.experiment().active_s
    killed_s = time.monotonic()
    wait_until(lambda: time.monotonic() - killed_s > 3, "no manager runs for a while")
    started_s = time.monotonic()
    experiment.start()
    elapsed_s = experiment.summary()["elapsedS"]
    assert stored_s <= elapsed_s <= stored_s + time.monotonic() - started_s
    assert experiment.summary()["maxExecDurationS"] == 3600
    (experiment.code / "gate").touch()  # the trial ignores SIGTERM, so this file lets the trial end
