"""Files and folders of a workspace are removed, cut or replaced at random: while trials run, and while no manager runs; on
this machine, and on shared storage of OpenPAI.

The experiment must end, or an error message must name the unusable file and the remedy. A stop leaves no process. Data that
is still on the disk and signed must not be lost.
"""

import contextlib
import os
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from amounts import amount
from deadlines import scaled_s
from fault_checker import offsets_that_differ
from openpai_here import an_openpai_here
from real_experiment import wait_until

from nni_manager.client.experiments import KnownExperiment
from nni_manager.client.manager_stop import stop_experiment
from nni_manager.client.remains import end_without_manager
from nni_manager.engine.shared_files import is_signed
from nni_manager.errors import RetryableError
from nni_manager.store.reader import StoreReader
from nni_manager.support.leftovers import processes_of

pytestmark = pytest.mark.timeout(400)

SEEDS = amount(1, 40)
_ENDS_S = 180.0
# A trial runs two seconds and reports 100 values, so that damage occurs before, during and after its reports.
TRAIN = """
import time
import nni_sdk as nni
nni.get_next_parameter()
for i in range(100):
    nni.report_intermediate_result(i)
    print("step", i, flush=True)
    time.sleep(0.01)
nni.report_final_result(1)
"""
NO_STATE = re.compile(r"^(db|log|jobs)(/|$)|\.lock$|-process\.json$|\.pem$|^ended-sessions|/__pycache__(/|$)")
# The Python of a trial reads these files to their end, and an endless file would take all memory. So a link to /dev/zero never
# replaces one of these files.
READ_BY_TRIALS = re.compile(r"^sdk/|/code/|/parameter\.cfg$")


def cut(path):
    with contextlib.suppress(OSError):
        os.truncate(path, path.stat().st_size // 2)


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replaced_by(make):
    def replace(path):
        remove(path)
        with contextlib.suppress(OSError):  # another process may have created the path again
            make(path)

    replace.__name__ = f"replaced by {make.__name__}"
    return replace


def a_pipe(path):
    os.mkfifo(path)


def a_folder(path):
    path.mkdir()


def a_file(path):
    path.write_bytes(b"not what was there")


def a_link(path):
    path.symlink_to("/dev/zero")


DAMAGES = (cut, remove, remove, *map(replaced_by, (a_pipe, a_folder, a_file, a_link)))


@dataclass
class Damaged:
    """A workspace, and a record of the damage."""

    root: Path
    chance: random.Random
    paths: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def damage(self):
        """Damage one random file or folder."""
        inside = [
            path for path in self.root.rglob("*") if not NO_STATE.search(str(path.relative_to(self.root)))
        ]
        # A random depth is chosen before the path, because most paths are inside attempts. Otherwise other files would rarely be
        # damaged.
        depth = self.chance.choice(sorted({len(path.parts) for path in inside}))
        path = self.chance.choice(sorted(path for path in inside if len(path.parts) == depth))
        is_read_by_trials = READ_BY_TRIALS.search(str(path.relative_to(self.root)))
        how = self.chance.choice(DAMAGES[:-1] if is_read_by_trials else DAMAGES)
        how(path)
        self.paths.append(path)
        self.notes.append(f"{how.__name__}: {path.relative_to(self.root)}")

    def has_hit(self, path):
        """True if the path, or a folder above it, was damaged."""
        return any(path == each or each in path.parents for each in self.paths)


def what_was_refused(experiment):
    """Start a manager. Return the last line of its stderr if it does not start, or an empty text."""
    try:
        experiment.start()
    except AssertionError:
        assert experiment.manager.poll() is not None, "the manager neither starts nor ends"
        return experiment.folder.manager_stderr.read_text().strip().splitlines()[-1]
    return ""


def stop(known):
    with contextlib.suppress(RetryableError):
        if known.running_process() is None:
            end_without_manager(known)
        else:
            stop_experiment(KnownExperiment(known.folder, known.running_process()))


@pytest.fixture
def platform_keys(request, tmp_path, monkeypatch):
    """Return a function that makes the platform keys of an experiment file, with or without `reuse`."""
    if request.param == "local":
        yield lambda *, reuse: {"localConfig": {"reuse": reuse}}
        return
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "openpai").mkdir()
    with an_openpai_here(tmp_path / "openpai") as here:
        yield here.experiment_keys


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("platform_keys", ["local", "openpai"], indirect=True)
def test_an_experiment_in_a_damaged_workspace_ends_or_reports_a_remedy(
    a_real_experiment, platform_keys, seed
):
    chance = random.Random(seed)
    keys = platform_keys(reuse=chance.random() < 0.4)
    keys |= {"trialConcurrency": 2, "maxTrialNum": 6, "maxTrialDuration": "30s"}
    experiment = a_real_experiment(TRAIN, logCollection="http", **keys)
    experiment.start()
    wait_until(lambda: experiment.row_count() > 20, "trials report")
    workspace = experiment.folder.workspace
    damaged = Damaged(workspace.root, chance)
    told = ""
    for _ in range(chance.randint(1, 4)):
        time.sleep(chance.random())  # a random delay before the damage; there is no event to wait for
        dies = chance.random() < 0.4
        if dies:
            experiment.kill_manager()
        damaged.damage()
        if dies and (told := what_was_refused(experiment)):
            break
    known = KnownExperiment(experiment.folder, None)
    state = ""
    if not told:
        with contextlib.suppress(AssertionError):
            state = experiment.wait_for_status("DONE", "ERROR", timeout_s=scaled_s(_ENDS_S))["status"]
        if not state:
            told = experiment.summary()["problem"]
    stop(known)
    plan = f"seed {seed}: {'; '.join(damaged.notes)}"
    assert processes_of(workspace) == [], plan
    if not state:
        assert re.search(r"cannot .*; \w+", told), f"{plan}: {told!r}"
        assert any(str(path) in told for path in (*damaged.paths, workspace.root)), f"{plan}: {told!r}"
        return
    with StoreReader(experiment.folder.database) as reader:
        secret = reader.experiment().secret
        for trial in reader.trials():
            for key in workspace.attempts_of(trial.trial_id):
                folder = workspace.attempt(key)
                if damaged.has_hit(folder.path) or any(folder.path in path.parents for path in damaged.paths):
                    continue
                if is_signed(workspace, key, experiment.folder.experiment_id, secret):
                    wrong = offsets_that_differ(workspace, key, reader.offsets(key))
                    assert not wrong, f"{plan}: {trial.trial_id} {trial.state} {wrong}"
