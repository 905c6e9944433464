"""What `pip install trial-keeper` alone lacks: the packages of nnictl, of the manager and of the Python API are in an extra."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

_OWN = ("nni_manager", "nni_sdk", "trial_keeper")


class ManagerExtraMissing(ModuleNotFoundError):
    """A package of the extra `manager` is not installed."""


@contextlib.contextmanager
def required_extra(what: str) -> Iterator[None]:
    """Replace the error about a missing package by a sentence with the remedy. `what` cannot run without it.

    Raises:
        ManagerExtraMissing: an import within the block has found a package missing.
    """
    try:
        yield
    except ManagerExtraMissing:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OWN:
            raise
        raise ManagerExtraMissing(
            f"cannot run {what}: the package {error.name} is not installed for {sys.executable}; "
            f"run `{sys.executable} -m pip install 'trial-keeper[manager]'`",
            name=error.name,
        ) from error
