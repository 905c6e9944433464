"""`import nni` in a trial: the real package if this Python has it anywhere, else nni_sdk under NNI's name.

This folder's place on the path decides nothing: PYTHONPATH precedes the installed packages, so the rest of the path is searched
first. Any Python can read this file, because a real package may be installed in one that is too old for nni_sdk.
"""

import os
import sys

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any  # noqa: F401 - in comments


def _folder(path):  # type: (str) -> str
    return os.path.realpath(path or os.curdir)


def _real_package():  # type: () -> Any
    """Return the spec of a package or module nni that is not in this folder, or None."""
    # importlib.machinery has the same class, but imports twice as much as nni_sdk does.
    from _frozen_importlib_external import PathFinder

    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is None:
            continue
        # An editable install may have a finder of its own. Others search the whole path, and find this file again.
        places = (
            [each for each in sys.path if _folder(each) not in _searched] if finder is PathFinder else None
        )
        spec = find("nni", places)
        # A folder without __init__.py is no package nni.
        if spec is not None and spec.loader is not None:
            package = os.path.dirname(spec.origin or "")
            if _folder(os.path.dirname(package)) not in _searched:
                return spec
    return None


def _become(spec):  # type: (Any) -> None
    """Execute the real package in the place of this one. Another fallback on the path does not search here again."""
    from importlib.util import module_from_spec

    real = module_from_spec(spec)  # type: Any
    real._searched = _searched
    # Other threads wait for the end of this import.
    spec._initializing = True
    sys.modules["nni"] = real
    try:
        spec.loader.exec_module(real)
    finally:
        spec._initializing = False
        del real._searched


_searched = globals().get("_searched", set())
_searched.add(_folder(os.path.dirname(os.path.dirname(__file__))))
_spec = _real_package() if sys.version_info[0] > 2 else None
if _spec is not None:
    _become(_spec)
else:
    from nni_sdk.aliases import use_sdk

    use_sdk()
