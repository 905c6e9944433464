"""Moves torn state files aside. A power cut or a full disk can leave half of a file, or an empty one.

A torn file is renamed to `<name>.torn-<number>`. No program reads the renamed file; it is kept for inspection.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

NOT_WHOLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that a JSON parser and a constructor raise for an invalid document."""


def set_aside(path: Path, why: object) -> None:
    """Rename a torn file.

    Raises:
        OSError: it cannot be renamed.
    """
    for number in itertools.count(1):
        aside = path.with_name(f"{path.name}.torn-{number}")
        if not os.path.lexists(aside):
            os.replace(path, aside)
            log.warning("%s is torn (%s): renamed it to %s, and created a new one", path, why, aside.name)
            return


def read_state(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """The result of `parse` for a state file. None: the file does not exist, or it was torn and has been moved aside.

    `parse` may raise any of `NOT_WHOLE`.

    Raises:
        OSError: it cannot be read or moved.
    """
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except NOT_WHOLE as error:
        set_aside(path, repr(error))
        return None
