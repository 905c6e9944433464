"""The changes that users make to a running experiment. Each change is durable before the response, and survives a resume.

Limits and the search space are parts of the configuration, so a change rewrites the experiment's configuration row.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nni_manager.config.changes import ChangeInvalid, changed
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.prior_results import results_of
from nni_manager.domain.events import LimitsChanged, RemarksChanged, TrialProposed
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.remarks import Remarks, RemarksChange
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.history import History
from nni_manager.engine.runtime import Runtime
from nni_manager.engine.snapshot import limits_of
from nni_manager.engine.tuner_executor import TunerExecutor
from nni_manager.errors import RetryableError, UserError
from nni_manager.store.rows import config_row, imported_rows
from nni_sdk.nesting import TOO_DEEP, deep_entry
from trial_keeper.wire.checkpoints import Checkpoint

log = logging.getLogger(__name__)


class FailedPrecondition(UserError):
    """cannot do this in the present state of the experiment; see `nnictl experiment status`"""


class TunerFailedOver(RetryableError):
    """cannot change the search space: the tuner failed; `nnictl experiment status` shows the error"""


@dataclass(eq=False)
class ExperimentCommands:
    """Performs user commands on one experiment. Runs on the engine's loop."""

    runtime: Runtime
    experiment: ExperimentCore
    config: ExperimentSpec
    """The current configuration."""
    tuner_executor: TunerExecutor
    history: History
    find_checkpoints: Callable[[Trial], Sequence[Checkpoint]]
    """Returns those from which a trial may continue. Blocks."""
    new_trial_id: Callable[[], str]
    imported: int = 0
    """The number of results that were imported, also under earlier managers."""
    _tuner_updates: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Serialises tuner updates; results are persisted before the tuner sees them."""

    async def update(self, update_type: str, params: Mapping[str, Any]) -> None:
        """Change one limit, or the search space; see `config.changes.changed`. A new limit does not stop running trials.

        Raises:
            ChangeInvalid, ConfigInvalid: the change is not valid.
            TunerFailedOver: the tuner failed; the change is stored and takes effect after a resume.
        """
        before = self.config
        after = self.config = changed(before, update_type, params)
        if after == before:
            return
        log.info("changed %s", update_type)
        self.runtime.save(config_row(after.to_json()))
        self.runtime.post(LimitsChanged(limits_of(after)))
        await asyncio.shield(self.runtime.durable())
        if after.search_space_revision != before.search_space_revision:
            async with self._tuner_updates:
                is_done = await self.tuner_executor.change_space(after, *self.history.all_known())
            if not is_done:
                raise TunerFailedOver(
                    "cannot change the search space: the tuner failed; "
                    f"`nnictl experiment status {self.experiment.experiment_id}` shows the error"
                )
        await asyncio.shield(self.runtime.durable())

    async def import_data(self, raw: Any) -> dict[str, int]:
        """Import results from elsewhere for the tuner. Returns the number of imported results and how many the tuner uses.

        Raises:
            ConfigInvalid: the data is invalid; lists all errors, and nothing is imported.
        """
        config = self.config
        # Ten thousand results take a second, so this runs in a thread.
        results = tuple(
            await asyncio.to_thread(
                results_of, raw, config.search_space, config.tuner.name, config.all_objectives
            )
        )
        async with self._tuner_updates:
            position, self.imported = self.imported, self.imported + len(results)
            self.runtime.save(imported_rows(position, results))
            await asyncio.shield(self.runtime.durable())
            used = await self.tuner_executor.teach(results)
        log.info("imported %d results; the tuner uses %d of them", len(results), used)
        return {"imported": len(results), "used": used}

    async def propose(self, parameters: Mapping[str, Any], continues: str | None = None) -> Trial:
        """Create a trial with these parameters, independent of the tuner and of reached limits.

        `continues`: the trial from whose checkpoint it continues.

        Raises:
            ChangeInvalid: the parameters are nested too deeply.
            FailedPrecondition: the experiment starts no trials in its present state.
        """
        if (deep := deep_entry(parameters)) is not None:
            raise ChangeInvalid(
                f"cannot start a trial: its parameter {deep!r} is {TOO_DEEP}; make it flatter"
            )
        experiment = self.experiment
        if not experiment.accepts_trials:
            name, state = experiment.experiment_id, experiment.state.value
            raise FailedPrecondition(
                f"cannot start a trial: experiment {name} is {state}; resume it first with `nnictl resume {name}`"
            )
        trial_id = self.new_trial_id()
        self.runtime.post(TrialProposed(trial_id, parameters, time.time(), continues))
        await asyncio.shield(self.runtime.durable())
        return experiment.trials[trial_id]

    async def change_remarks(self, change: RemarksChange, trial: Trial | None = None) -> Remarks:
        """Change the remarks of a trial, and return the new ones; `trial` None: of the experiment. Possible in every state.

        Raises:
            RemarksInvalid: there would be too many tags.
        """
        before = self.experiment.remarks if trial is None else trial.remarks
        after = change.applied_to(before)
        if after != before:
            self.runtime.post(RemarksChanged(None if trial is None else trial.trial_id, after))
        # Also without a change: the request that this one repeats may not be stored yet.
        await asyncio.shield(self.runtime.durable())
        return after

    async def retry(self, trial: Trial, *, from_checkpoint: bool = False) -> Trial:
        """Create a trial with the parameters of a terminal trial that did not succeed; the old trial is unchanged.

        `from_checkpoint`: the new trial continues from the newest checkpoint of the old one.

        Raises:
            FailedPrecondition: the trial is not terminal or has succeeded, or the experiment starts no trials at present; or
                it has no checkpoint from which to continue.
        """
        if not trial.state.is_terminal or trial.state is TrialState.SUCCEEDED:
            raise FailedPrecondition(
                f"cannot retry trial {trial.trial_id}: its state is {trial.state.value}; only trials that ended without "
                "success can be retried"
            )
        if not from_checkpoint:
            return await self.propose(trial.parameters)
        found = await asyncio.to_thread(self.find_checkpoints, trial)
        if not found:  # the new trial would start at its first step
            raise FailedPrecondition(
                f"cannot continue trial {trial.trial_id}: it has no signed checkpoint; let the training code call "
                "nni_sdk.save_checkpoint(), or retry the trial from its first step"
            )
        return await self.propose(trial.parameters, found[0].trial_id)
