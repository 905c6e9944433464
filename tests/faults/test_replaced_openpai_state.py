"""State files of the local OpenPAI, of its storage and of an experiment on it are replaced or made unreadable.

A resume works, or an error message names the file and the remedy. `make thorough` damages each file alone, in each form. The
short test damages the files in groups, each group in one form. It omits files that an experiment on the local platform also has;
`test_replaced_state_files.py` tests these.
"""

import contextlib
import itertools
import os
import re
import shutil
import subprocess

import psutil
import pytest
from amounts import IS_THOROUGH
from deadlines import scaled_s
from lost_machine import committed, state_files, what_is_lost
from openpai_home import BIN, OpenPaiHome, created, environ_of, processes_of
from real_experiment import wait_until
from replaced_files import (
    FORMS,
    in_groups,
    make_a_folder,
    make_a_pipe,
    make_unreadable,
    resume_and_restore,
    without_roots_privilege,
)

from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader

pytestmark = pytest.mark.timeout(3600 if IS_THOROUGH else 600)

# A resume that takes longer than this counts as hanging. It waits until the experiment ends, which takes about 5 s on an idle
# machine.
_HANGS_AFTER_S = 150.0
# The third and the fourth trial wait until the test creates the gate file.
_TRAIN = """
import os, time
import nni_sdk as nni
nni.get_next_parameter()
number = nni.get_sequence_id()
for i in range(20):
    nni.report_intermediate_result(i)
while number in (2, 3) and not os.path.exists({gate!r}):
    time.sleep(0.05)
nni.report_final_result(number)
"""
# `state_files` leaves out empty files, so these lock files are added to the list.
_LOCKS = tuple(f"state/trial-keeper/openpai/{name}" for name in ("owner.lock", "cluster/lock"))
# The test does not damage logs, code and work/, because neither the manager nor the service reads these files. Of the SDK, the
# test damages only one file, because the set of compiled files varies between runs.
_NO_STATE = re.compile(r"^work/|/code/|/logs/|/sdk/nni_sdk/(?!trial\.py)")


class LostHome:
    """A home whose machine was lost while two trials ran on its OpenPAI and after two trials had ended. No process is left."""

    def __init__(self, folder):
        self.path = folder / "home"
        self.whole = folder / "whole"
        self.gate = self.path / "gate"
        self.path.mkdir()
        self.made = OpenPaiHome(self.path, "process", {})
        work = self.path / "work"
        with pytest.MonkeyPatch.context() as patch:
            self.made.enter(patch)
        (work / "train.py").write_text(_TRAIN.format(gate=str(self.gate)))
        config = (work / "config.yml").read_text().replace("maxTrialNum: 3", "maxTrialNum: 5")
        (work / "config.yml").write_text(config)
        self.experiment_id = created(self.nnictl("create", "--config", "config.yml", "--port", "auto"))
        self.folder = ExperimentFolder(self.path / "experiments" / self.experiment_id)
        self.entry = f"state/trial-keeper/experiments/{self.experiment_id}.json"
        wait_until(lambda: self.ends_and_rows() == (2, 82), "two trials have ended and two run")
        self.kill_all()
        shutil.copytree(self.path, self.whole, symlinks=True)
        ends, rows = committed(self.folder)
        # OpenPAI restarts a trial that ran when the machine was lost, and only the new attempt counts. So only rows of ended
        # trials are compared.
        self.before = ends, {row for row in rows if row[0] in ends}
        assert (len(ends), len(self.before[1])) == (2, 42)

    def nnictl(self, *arguments):
        return subprocess.run(
            [BIN / "nnictl", *arguments],
            cwd=self.path / "work",
            env=environ_of(self.path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled_s(_HANGS_AFTER_S),
            preexec_fn=without_roots_privilege,
        )

    def ends_and_rows(self):
        with StoreReader(self.folder.database) as reader:
            return sum(trial.state.is_terminal for trial in reader.trials()), len(reader.metrics())

    def kill_all(self):
        """Kill all processes of this home. The loop repeats because a supervisor may start a process during the kill."""
        while found := processes_of(self.path):
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def restore(self):
        """Restore the home as it was when the machine was lost."""
        shutil.rmtree(self.path)
        shutil.copytree(self.whole, self.path, symlinks=True)

    def resume_with(self, damage):
        """Damage each file in the given form, and resume the experiment; return what is wrong, or None."""
        self.restore()
        self.gate.touch()
        for name, form in damage.items():
            form(self.path / name)

        # If the user's list of experiments has lost the entry of this experiment, nnictl cannot find it by id. The command then
        # names the folder.
        is_listed = os.path.lexists(self.path / self.entry)
        folder = () if is_listed else ("--experiment-dir", self.folder.path)

        def resume():
            done = self.nnictl("resume", self.experiment_id, *folder, "--port", "auto", "--foreground")
            return done.stderr if done.returncode else ""

        try:
            wrong = resume_and_restore(resume, self.path, self.whole, damage)
            wrong = wrong or what_is_lost(self.folder, self.before)
            stopped = self.nnictl("openpai", "stop-service")
            wrong = wrong or (stopped.returncode and stopped.stderr)
            left = [process.cmdline() for process in processes_of(self.path)]
            wrong = wrong or (left and f"still runs: {left}")
        except subprocess.TimeoutExpired as error:
            wrong = str(error)
        finally:
            self.kill_all()
        return f"{ {name: form.__name__ for name, form in damage.items()} }: {wrong}" if wrong else None


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    made = LostHome(tmp_path_factory.mktemp("lost"))
    yield made
    made.kill_all()


# The thorough cases are split by form, so that several workers share them.
@pytest.mark.parametrize(
    "forms", [[form] for form in FORMS] if IS_THOROUGH else [[make_a_folder, make_a_pipe, make_unreadable]]
)
def test_a_resume_on_openpai_works_or_names_the_file_and_a_remedy_if_a_state_file_was_replaced(lost, forms):
    kinds = [name for name in state_files(lost.whole).values() if not _NO_STATE.search(name)]
    kinds += _LOCKS
    if IS_THOROUGH:
        cases = [{name: form} for name, form in itertools.product(kinds, forms)]
    else:
        kinds = [name for name in kinds if not name.startswith("experiments/")]
        groups = in_groups(kinds, len(forms))
        cases = [dict.fromkeys(names, form) for names, form in zip(groups, forms, strict=True)]
    print(f"{len(kinds)} state files, {len(cases)} resumes")
    wrong = [problem for damage in cases if (problem := lost.resume_with(damage)) is not None]
    assert not wrong, "\n".join(wrong)
