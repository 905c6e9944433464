"""State files were removed, replaced or made unreadable. `nnictl resume` works, or its message names the file and the remedy.

`make thorough` damages each file alone, in each form. The short test damages the files in groups, each group in one form.
"""

import concurrent.futures
import itertools
import subprocess

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
from replaced_files import FORMS, in_groups, resume_and_restore, without_roots_privilege
from user_home import BIN, environ_of

from nni_manager.store.registry import Registry

pytestmark = pytest.mark.timeout(1200 if IS_THOROUGH else 300)

AT_ONCE = 4
_HANGS_AFTER_S = 60.0


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """An experiment whose machine was lost while two trials ran and after two trials had ended. No process is left."""
    return a_lost_experiment(tmp_path_factory.mktemp("whole"))


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
    """Damage files of a copy, each in its given form, and resume the copy; return what is wrong, or None."""
    copy, home = copy_of(whole, folder), folder / "home"
    home.mkdir()
    Registry(folder / "state" / "trial-keeper" / "experiments").add(copy.folder)
    for name, form in damage.items():
        form(copy.folder.path / name)

    def resume():
        done = nnictl(home, "resume", copy.folder.experiment_id, "--port", "auto")
        return done.stderr if done.returncode else ""

    try:
        wrong = resume_and_restore(resume, copy.folder.path, whole.folder.path, damage)
        if not wrong:
            # The result counts only if the resumed experiment also completes its trials.
            copy.wait_for_status("DONE")
            wrong = what_is_lost(copy.folder, before)
            stopped = nnictl(home, "stop", copy.folder.experiment_id)
            wrong = wrong or (stopped.returncode and stopped.stderr)
    except (subprocess.TimeoutExpired, AssertionError) as error:
        wrong = str(error)
    finally:
        for process in processes_in(copy.folder):
            process.kill()
    return f"{ {name: form.__name__ for name, form in damage.items()} }: {wrong}" if wrong else None


def test_if_a_state_file_was_replaced_a_resume_either_works_or_names_the_file_and_a_remedy(lost, tmp_path):
    files = [*state_files(lost.folder.path).values(), "log/nnimanager.log"]
    # The test reads a copy, because reading may change SQLite's files.
    whole = copy_of(lost, tmp_path / "to look at")
    before = committed(whole.folder)
    if IS_THOROUGH:
        cases = [{name: form} for name, form in itertools.product(files, FORMS)]
    else:
        groups = in_groups(files, len(FORMS))
        cases = [dict.fromkeys(names, form) for names, form in zip(groups, FORMS, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        done = [
            pool.submit(resume_with, lost, tmp_path / str(number), damage, before)
            for number, damage in enumerate(cases)
        ]
        wrong = [problem for each in done if (problem := each.result()) is not None]
    assert not wrong, "\n".join(wrong)
