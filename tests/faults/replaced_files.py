"""Replace state files of an experiment, resume it repeatedly, and check that the error messages name the replaced files."""

import ctypes
import os
import re
import shutil
from pathlib import Path


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


def in_groups(names, number):
    """Distribute the names to `number` groups. Adjacent names, which belong to one attempt or database, go to different groups: a
    case then replaces few files of each.
    """
    return [list(names)[first::number] for first in range(number)]


def without_roots_privilege():
    """Drop capabilities before exec, so that even root can read only files whose mode allows it."""
    if os.geteuid() == 0:
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def resume_and_restore(resume, root, whole, names):
    """Resume repeatedly.

    After each refusal, check that the message names a damaged file and a remedy, and restore the file. Return a description of
    the first message that lacks either, or an empty text. `resume` returns the error message of a refused resume, or an empty
    text. `names`: the damaged files below `root`. `whole`: a folder with the undamaged files.
    """
    left = list(names)
    while told := resume():
        last = told.strip().splitlines()[-1]
        # Two files may have the same name, so full paths are searched before names.
        named = _found_in(last, {name: str(root / name) for name in left})
        named = named or _found_in(last, {name: Path(name).name for name in left})
        has_remedy = re.match(r"(ERROR: )?cannot .*; \w+", last) and "--debug" not in last
        if not named or not has_remedy or "Traceback" in told:
            return f"the message names no file and remedy: {told}"
        print(f"{', '.join(named)}: {last}")
        for name in named:
            _restore(root / name, whole / name)
            left.remove(name)
    return ""


def _found_in(message, texts):
    """The keys whose text occurs in the message. An occurrence inside a longer file name does not count."""
    return [
        key for key, text in texts.items() if re.search(rf"(?<![\w.-]){re.escape(text)}(?![\w-])", message)
    ]


def _restore(path, whole):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    shutil.copy2(whole, path)
