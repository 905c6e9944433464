"""Starts trials with a person's parameters in a running experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nni_manager.client import output
from nni_manager.client.manager_client import ManagerClient
from nni_manager.config.algorithms import problems_within
from nni_manager.config.search_space import parse_search_space


def add_trial(client: ManagerClient, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Start a trial before the tuner's next one; return its `trialJobId` and `sequenceId`.

    Warnings name the parameters that lie outside the search space, and those that are missing: a person may know why.

    Raises:
        ManagerRefusal: the experiment accepts no trial.
    """
    current = client.get("/configuration")
    space = parse_search_space(current["searchSpace"], for_own_class=True)
    problems = problems_within(space, current["tuner"]["name"], parameters)
    started: dict[str, Any] = client.post("/trial-jobs", document=parameters)
    for problem in problems:
        output.warning(
            f"trial {started['trialJobId']} lies outside the search space: {problem}; it is started anyway"
        )
    return started
