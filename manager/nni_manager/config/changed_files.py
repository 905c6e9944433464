"""Whether the search space of an experiment file can be another one than at a given time, without reading the space.

The reader of experiment files imports all their schemas, and takes ten times as long.
"""

import os
from pathlib import Path

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.document import read_yaml

# The clock of a file server may be behind. The files are also read some seconds before the experiment is created.
_TOLERANCE_S = 10.0
_NAMES_OF_FILE = ("searchSpacePath", "searchSpaceFile")


def space_may_have_changed(path: Path, since_s: float) -> bool:
    """False if the experiment file is gone, or if it and the file of its search space have not changed since this time."""
    try:
        if not os.path.lexists(path):
            return False
        if _has_changed(path, since_s):
            return True
        document = read_yaml(path).value
        named = (document.get(name) for name in _NAMES_OF_FILE)
        return any(_has_changed(path.parent / os.path.expanduser(each), since_s) for each in named if each)
    except (OSError, ConfigInvalid, AttributeError, TypeError):
        return True  # a path that only the reader understands, or no experiment file any more


def _has_changed(path: Path, since_s: float) -> bool:
    # The change times: a file that is moved to this place keeps its modification time.
    newest_s = max(path.stat().st_ctime, path.lstat().st_ctime)
    return newest_s > since_s - _TOLERANCE_S
