"""A power failure or a full disk has truncated state files.

A resume works, or the error message names the file and the remedy. With THOROUGH=1, the test damages each file alone, in both
forms. Otherwise it damages the files in four groups: it empties two groups, and cuts the files of the other two in half.
"""

import concurrent.futures
import contextlib
import os
import subprocess

import pytest
from amounts import IS_THOROUGH
from free_ports import free_port_pair
from lost_machine import (
    RECORDS,
    a_lost_experiment,
    committed,
    copy_of,
    processes_in,
    state_files,
    what_is_lost,
)
from real_experiment import RealExperiment, assert_rows_are_what_was_written, wait_until
from replaced_files import in_groups, resume_and_restore

from nni_manager.client import manager_process

pytestmark = pytest.mark.timeout(300)

AT_ONCE = 4
FORMS = ("emptied", "cut in half")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """An experiment whose machine was lost while two trials ran and after two trials had ended. No process is left."""
    return a_lost_experiment(tmp_path_factory.mktemp("whole"))


def as_it_is(folder):
    return {
        path.name: path.read_bytes()
        for path in (folder.path / "db").iterdir()
        if path.suffix != ".sqlite-shm"
    }


def truncate(path, form):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if form == "cut in half" else b"")


def resume_with(whole, folder, damage, before):
    """Damage files of a copy, each in its given form, and resume the copy; return what is wrong, or None."""
    copy = copy_of(whole, folder)
    for name, form in damage.items():
        truncate(copy.folder.path / name, form)

    def resume():
        damaged_database = as_it_is(copy.folder)
        try:
            copy.start()
        except AssertionError:
            told = copy.folder.manager_stderr.read_text()
            assert copy.manager.poll() is not None, f"the manager neither starts nor ends: {told}"
            assert as_it_is(copy.folder) == damaged_database, (
                "the resume was refused, but changed the database"
            )
            return told
        return ""

    try:
        wrong = resume_and_restore(resume, copy.folder.path, whole.folder.path, damage)
        if not wrong:
            # The restarted trials must end, too, so wait until the experiment is done.
            copy.wait_for_status("DONE")
            wrong = what_is_lost(copy.folder, before)
    except AssertionError as error:
        wrong = str(error)
    finally:
        copy.close()
    return f"{damage}: {wrong}" if wrong else None


def test_a_resume_works_or_names_the_file_and_a_remedy_if_a_state_file_is_truncated(stopped, tmp_path):
    kinds = state_files(stopped.folder.path)
    assert {"db/experiment.sqlite", "db/experiment.sqlite-wal", "jobs/*.json", "tls.pem"} <= kinds.keys(), (
        kinds
    )
    # The test reads a copy, because reading may change SQLite's files.
    whole = copy_of(stopped, tmp_path / "to look at")
    before = committed(whole.folder)
    assert (len(before[0]), len(before[1])) == (2, RECORDS)
    if IS_THOROUGH:
        cases = [{name: form} for name in kinds.values() for form in FORMS]
    else:
        groups = in_groups(kinds.values(), AT_ONCE)
        cases = [dict.fromkeys(names, FORMS[number % 2]) for number, names in enumerate(groups)]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        done = [
            pool.submit(resume_with, stopped, tmp_path / str(number), damage, before)
            for number, damage in enumerate(cases)
        ]
        wrong = [problem for each in done if (problem := each.result()) is not None]
    assert not wrong, "\n".join(wrong)


UNTIL_GATE = """
import os, time
import nni_sdk as nni
nni.get_next_parameter()
for i in range(10**6):
    nni.report_intermediate_result(i)
    if os.path.exists("gate"):
        break
    time.sleep(0.05)
nni.report_final_result(i)
"""


@pytest.mark.smoke
def test_a_manager_adopts_a_running_trial_although_its_job_state_file_is_truncated(a_real_experiment):
    experiment = a_real_experiment(UNTIL_GATE, maxTrialNum=2)
    experiment.start()
    wait_until(
        lambda: experiment.row_count() > 10 and len(experiment.keeper_pids()) == 2, "both trials report"
    )
    keepers = sorted(experiment.keeper_pids())
    experiment.kill_manager()
    for note, form in zip(experiment.folder.jobs.glob("*.json"), FORMS, strict=True):
        truncate(note, form)
    experiment.start()
    wait_until(
        lambda: sorted(experiment.keeper_pids()) == keepers, "the state files name the same processes again"
    )
    assert len(list(experiment.folder.jobs.glob("*.json.torn-1"))) == 2
    assert "is torn" in experiment.folder.manager_log.read_text()
    (experiment.code / "gate").touch()
    experiment.wait_for_status("DONE")
    trials = experiment.get("/trials")
    assert [(trial["status"], trial["attempt"]) for trial in trials] == [("SUCCEEDED", 0)] * 2
    for trial in trials:
        assert_rows_are_what_was_written(experiment, trial["id"])


def test_a_trial_with_a_truncated_exit_record_keeps_its_results(a_real_experiment):
    experiment = a_real_experiment(UNTIL_GATE, maxTrialNum=2, trialConcurrency=1)
    experiment.start()
    wait_until(lambda: experiment.row_count() > 10, "a trial reports")
    (trial,) = experiment.get("/trials")
    experiment.kill_manager()
    (experiment.code / "gate").touch()  # the trial ends while no manager runs
    (key,) = experiment.folder.workspace.attempts_of(trial["id"])
    end = experiment.folder.workspace.attempt(key).exit_json
    wait_until(end.exists, "the trial has ended")
    for process in processes_in(experiment.folder):
        process.kill()
    end.write_bytes(end.read_bytes()[:50])
    experiment.start()
    experiment.wait_for_status("DONE")
    lost, other = experiment.get("/trials")
    assert (lost["status"], lost["reason"]) == ("FAILED", "keeper lost")
    assert other["status"] == "SUCCEEDED"
    for each in (lost, other):
        assert_rows_are_what_was_written(experiment, each["id"])


@pytest.fixture
def small_disk(tmp_path):
    """A small separate disk for the folder of an experiment."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.smoke
def test_a_resume_on_a_full_disk_is_refused_and_works_after_space_is_freed(small_disk, tmp_path):
    experiment = RealExperiment(
        tmp_path / "experiment", "import nni_sdk as nni\nnni.report_final_result(1)\n",
        maxTrialNum=2, logDir=str(small_disk),
    )  # fmt: skip
    experiment.create()
    experiment.start()
    experiment.wait_for_status("DONE")
    before = experiment.get("/metric-data")
    experiment.kill_manager()
    with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    with pytest.raises(manager_process.ManagerFailed) as refused:
        manager_process.start_manager(experiment.folder, [free_port_pair()], debug=False)
    assert str(refused.value) == (
        f"cannot start the manager of experiment TESTEXPT: cannot write in {experiment.folder.path}: "
        "No space left on device; free some space there, then try again: no stored data is lost"
    )
    assert not processes_in(experiment.folder)
    (small_disk / "filler").unlink()
    experiment.start()
    try:
        assert experiment.get("/metric-data") == before
        assert experiment.summary()["status"] == "DONE"
    finally:
        experiment.close()
