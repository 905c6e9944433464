"""Amounts of work in tests: short ones for `make test` and `make e2e`, full ones for `make thorough`."""

import os
from typing import TypeVar

T = TypeVar("T")
IS_THOROUGH = bool(os.environ.get("THOROUGH"))


def amount(short: T, full: T) -> T:
    """The full amount if THOROUGH is set, else the short one. A test must check the same property with both amounts."""
    return full if IS_THOROUGH else short
