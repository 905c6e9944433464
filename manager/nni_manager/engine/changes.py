"""What people change while an experiment runs. All of it is durable before it is answered, and in force after a resume.

Limits and the search space are parts of the configuration: the row that the experiment was made from is written anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nni_manager.config.changes import changed
from nni_manager.config.known_results import results_of
from nni_manager.domain.events import LimitsChanged, TrialProposed
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.picture import limits_of
from nni_manager.errors import TryAgain, UserMistake
from nni_manager.store.store import ConfigRow, ImportedRows

if TYPE_CHECKING:
    from nni_manager.engine.engine import Engine

log = logging.getLogger(__name__)


class NotNow(UserMistake):
    """cannot do this in the experiment's present state; see what the message says of it"""


class TunerFailedOver(TryAgain):
    """cannot change the search space: the tuner failed over it; `nnictl experiment status` shows how"""


class Changes:
    """Changes to the experiment of one engine, on its loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._imported = 0
        self._lessons = asyncio.Lock()
        """Held by who has the tuner learn from what is stored: results are in the store before it knows of them."""

    def imported_before(self, count: int) -> None:
        """So many results were imported to an earlier manager."""
        self._imported = count

    async def update(self, update_type: str, params: Mapping[str, Any]) -> None:
        """Change one limit, or the search space; see `config.changes.changed`. Limits end nothing that runs.

        Raises:
            ChangeInvalid, ConfigInvalid: not so.
            TunerFailedOver: it is stored, and in force after a resume.
        """
        engine = self._engine
        before = engine.config
        after = engine.config = changed(before, update_type, params)
        if after == before:
            return
        log.info("%s is changed", update_type)
        stored = engine.commits.add([ConfigRow(after.to_json())])
        engine.post(LimitsChanged(limits_of(after)))
        await asyncio.shield(stored)
        if after.search_space_revision != before.search_space_revision:
            async with self._lessons:
                is_done = await engine.algorithms.change_space(after, *engine.all_known())
            if not is_done:
                raise TunerFailedOver(
                    "cannot change the search space: the tuner failed over it; "
                    f"`nnictl experiment status {engine.experiment.experiment_id}` shows how"
                )
        await asyncio.shield(engine.durable())

    async def import_data(self, raw: Any) -> dict[str, int]:
        """Let the tuner learn from results of elsewhere: how many were imported, and how many of them it makes use of.

        Raises:
            ConfigInvalid: with every mistake; nothing is imported then.
        """
        engine = self._engine
        # Of ten thousand it takes a second.
        results = tuple(
            await asyncio.to_thread(results_of, raw, engine.config.search_space, engine.config.tuner.name)
        )
        async with self._lessons:
            position, self._imported = self._imported, self._imported + len(results)
            await asyncio.shield(engine.commits.add([ImportedRows(position, results)]))
            used = await engine.algorithms.teach(results)
        log.info("%d results were imported, and the tuner uses %d", len(results), used)
        return {"imported": len(results), "used": used}

    async def propose(self, parameters: Mapping[str, Any]) -> Trial:
        """A new trial with these parameters, whatever the tuner thinks and whichever limit is reached.

        Raises:
            NotNow: no trial is begun in the experiment's present state.
        """
        engine = self._engine
        if not engine.experiment.takes_trials:
            name, state = engine.experiment.experiment_id, engine.experiment.state.value
            raise NotNow(
                f"cannot begin a trial: experiment {name} is {state}; `nnictl resume {name}` goes on with it first"
            )
        trial_id = engine.new_trial_id()
        engine.post(TrialProposed(trial_id, parameters, time.time()))
        await asyncio.shield(engine.durable())
        return engine.experiment.trials[trial_id]

    async def retry(self, trial: Trial) -> Trial:
        """A new trial with the parameters of one that is over and did not succeed; that one stays as it is.

        Raises:
            NotNow: it is not over, or has succeeded, or no trial is begun in the experiment's present state.
        """
        if not trial.state.is_final or trial.state is TrialState.SUCCEEDED:
            raise NotNow(
                f"cannot retry trial {trial.trial_id}: it is {trial.state.value}; only one that is over and did not succeed "
                "can be begun again"
            )
        return await self.propose(trial.parameters)
