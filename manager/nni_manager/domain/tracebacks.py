"""Finds the exception that ended a Python program in its stderr.

Theory of operation. A traceback is a header, then frames (`  File "x.py", line 3, in f` and indented lines), then the exception
in the first line that is not indented; its message may continue for any number of lines. Only the end of stderr is kept, and the
header may be missing, so a frame is enough to recognise a traceback. The last of chained exceptions ended the program. In an
ExceptionGroup every line has a margin, which is deeper for the inner exceptions, and the group itself comes first. Exceptions
that the interpreter ignored (`Exception ignored in: …`) are written at its exit, and are not the cause. PyTorch prefixes each
line with `[rank0]: `.

Source: CPython, Lib/traceback.py.
"""

import math
import re
from functools import lru_cache

_FRAME_BEGINS = '  File "'
_FRAME = re.compile(r'  File ".*", line \d+(?:, in .*)?')
# A class has a dotted name or starts with a capital; it may be local to a function, or have its cause in brackets.
_EXCEPTION = re.compile(
    r"(?=[\w.<>]*\.|[A-Z_])[^\W\d]\w*(?:\.(?:<locals>|\w+))*(?:\([\w., ]*\))?(?::(?: .*)?)?"
)
_PLACE = re.compile(r'  File "(.*)", line (\d+)')
# The files of libraries and of Python itself.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen ")
_MARGIN = re.compile(r"(?:\[\w+\]: ?)?(?P<indent>(?: {2})+(?:[|+] ?|\+-))?")
# Python 3.13 colours a traceback when FORCE_COLOR is set.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HEADER = "Traceback (most recent call last):"
_FATAL = "Fatal Python error: "
_IGNORED = "Exception ignored "


# Parsing the stderr of ten thousand failed trials takes a second, and one page shows them all. The cached texts are those that
# the trials hold anyway.
@lru_cache(maxsize=16384)
def exception_line(stderr: str) -> str:
    """The line of the exception that ended the program; empty if there is no traceback. `stderr` may be only its end.

    If the message starts on the next line, both lines are joined.
    """
    if _FRAME_BEGINS not in stderr and _FATAL not in stderr:
        return ""
    found, found_depth, frame_depth = "", math.inf, 0
    in_frames = is_ignored = False
    for line in _COLOUR.sub("", stderr).splitlines():
        depth, bare = _without_margin(line.rstrip())
        if not bare:
            continue
        if found.endswith(":") and ": " not in found:
            found = f"{found} {bare.strip()}"
        elif bare.startswith(_FRAME_BEGINS) and _FRAME.fullmatch(bare):
            in_frames, frame_depth = True, depth
        elif bare.startswith(_FATAL):
            found, found_depth = bare, depth
        elif in_frames and (bare.startswith(" ") or depth != frame_depth):
            pass  # the frame's code; one of its lines may look like a margin
        elif in_frames and _EXCEPTION.fullmatch(bare):
            # A deeper exception is inside the group that was found.
            if not is_ignored and depth <= found_depth:
                found, found_depth = bare, depth
            in_frames = is_ignored = False
        else:
            in_frames = False
            is_ignored = bare.startswith(_IGNORED) or (is_ignored and bare == _HEADER)
            if depth == 0:
                found_depth = math.inf  # the group ends with its margin
    return found


def raised_at(stderr: str) -> str:
    """The file and the line of the last frame in the user's own code: `train.py:12`; empty without a traceback."""
    frames = _PLACE.findall(_COLOUR.sub("", stderr))
    own = [frame for frame in frames if not _INSTALLED.search(frame[0])] or frames
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""


def _without_margin(line: str) -> tuple[int, str]:
    """The depth of a line in exception groups, and the line without its margin."""
    if line.lstrip()[:1] not in ("|", "+", "["):
        return 0, line  # fast path for nearly all lines
    margin = _MARGIN.match(line)
    return (0, line) if margin is None else (len(margin["indent"] or "") // 2, line[margin.end() :])
