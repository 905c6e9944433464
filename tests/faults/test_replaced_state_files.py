"""State files that somebody has removed, replaced or made unreadable: nnictl resume works, or names the file and the remedy.

`make thorough` damages each file alone, in each form. In short, the files are damaged in groups, each in one form.
"""

import concurrent.futures
import ctypes
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from amounts import IS_THOROUGH
from deadlines import scaled_s
from lost_machine import (
    a_lost_experiment,
    committed,
    copy_of,
    processes_in,
    state_files,
    what_is_lost,
)
from user_home import BIN, environ_of

from nni_manager.store.folders import Registry

pytestmark = pytest.mark.timeout(1200 if IS_THOROUGH else 300)

AT_ONCE = 4
_HANGS_AFTER_S = 60.0


def remove(path):
    path.unlink()


def make_a_folder(path):
    path.unlink()
    path.mkdir()
    (path / "something").touch()


def make_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def link_to_zeros(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def make_unreadable(path):
    path.chmod(0)


FORMS = (remove, make_a_folder, make_a_pipe, link_to_zeros, make_unreadable)


def restore(path, whole):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    shutil.copy2(whole, path)


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """An experiment whose machine was lost while two trials ran and two had ended. No process is left."""
    return a_lost_experiment(tmp_path_factory.mktemp("whole"))


def without_roots_privilege():
    """Runs in the new process: root, too, can then read only what the mode allows."""
    if os.geteuid() == 0:
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def nnictl(home, *arguments):
    return subprocess.run(
        [BIN / "nnictl", *arguments],
        cwd=home,
        env=environ_of(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled_s(_HANGS_AFTER_S),
        preexec_fn=without_roots_privilege,
    )


def resume_with(whole, folder, damage, before):
    """Damage files of a copy, each in its form, and resume it; return what is wrong, or None.

    A file that a refusal names is restored, as its remedy says, and the resume is repeated.
    """
    copy, home = copy_of(whole, folder), folder / "home"
    home.mkdir()
    Registry(folder / "state" / "trial-keeper" / "experiments").add(copy.folder)
    damage = dict(damage)
    for name, form in damage.items():
        form(copy.folder.path / name)
    described = {name: form.__name__ for name, form in damage.items()}
    try:
        while (done := nnictl(home, "resume", copy.folder.experiment_id, "--port", "auto")).returncode:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            named = [name for name in damage if re.search(rf"\b{re.escape(Path(name).name)}(?![\w-])", last)]
            if len(named) != 1 or not re.match(r"ERROR: cannot .*; \w+", last) or "--debug" in last:
                return f"{described}: the message names no file and remedy: {done.stderr}"
            print(f"{named[0]}, {damage[named[0]].__name__}: {last}")
            restore(copy.folder.path / named[0], whole.folder.path / named[0])
            del damage[named[0]]
        # The restarted trial proves that the experiment continues.
        copy.wait_for_status("DONE")
        lost = what_is_lost(copy.folder, before)
        stopped = nnictl(home, "stop", copy.folder.experiment_id)
        lost = lost or (stopped.returncode and stopped.stderr)
    except (subprocess.TimeoutExpired, AssertionError) as error:
        return f"{described}: {error}"
    finally:
        for process in processes_in(copy.folder):
            process.kill()
    return f"{described}: {lost}" if lost else None


def test_a_resume_works_with_any_replaced_state_file_or_names_it_with_a_remedy(lost, tmp_path):
    files = [*state_files(lost.folder).values(), "log/nnimanager.log"]
    whole = copy_of(lost, tmp_path / "to look at")  # reading may change SQLite's files
    before = committed(whole.folder)
    if IS_THOROUGH:
        cases = [{name: form} for name, form in itertools.product(files, FORMS)]
    else:
        # Neighbours are of one attempt or one database, so they are in different groups.
        cases = [{} for _ in FORMS]
        for number, name in enumerate(files):
            cases[number % len(FORMS)][name] = FORMS[number % len(FORMS)]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        done = [
            pool.submit(resume_with, lost, tmp_path / str(number), damage, before)
            for number, damage in enumerate(cases)
        ]
        wrong = [problem for each in done if (problem := each.result()) is not None]
    assert not wrong, "\n".join(wrong)
