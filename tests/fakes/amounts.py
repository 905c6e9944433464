"""Amounts of work that `make test` and `make e2e` do in short and `make thorough` in full."""

import os
from typing import TypeVar

T = TypeVar("T")
IS_THOROUGH = bool(os.environ.get("THOROUGH"))


def amount(short: T, full: T) -> T:
    """The full amount if THOROUGH is set, else the short one. A test must check the same property with both amounts."""
    return full if IS_THOROUGH else short
