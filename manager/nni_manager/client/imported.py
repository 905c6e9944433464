"""Imports results of other trials into the tuner of a running experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nni_manager.client import output
from nni_manager.client.manager_client import ManagerClient


def import_results(client: ManagerClient, results: Sequence[Any]) -> dict[str, int]:
    """Import these results; return how many were imported, and how many of them the tuner uses.

    A warning has the number of results that the manager skipped: an export may have results without a finite number.

    Raises:
        ManagerRefusal: a result is invalid, or none has a finite number; nothing is imported.
    """
    counts: dict[str, int] = client.post("/experiment/import-data", document=results)
    if skipped := len(results) - counts["imported"]:
        output.warning(f"skipped {skipped} of {len(results)} results: they have no finite number to import")
    return counts
