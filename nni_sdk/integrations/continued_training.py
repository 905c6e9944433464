"""What a callback saves after each round, so that the next attempt continues: the model, and what the reporter knows."""

import json
import os

import nni_sdk
from nni_sdk.integrations.reporter import MetricReporter, is_first_process

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class ContinuedTraining:
    """The rounds of a training over all attempts of a trial.

    `rounds`: the number of complete rounds. `model`: the path of the model after them, in the framework's own format; None for a
    training that starts at its first round. A trial with other parameters than those of the checkpoint, such as a member of a
    population, has its parent's model, but none of its rounds and results.
    `is_inherited`: True for such a model: training must use the trial's own parameters in place of those stored with the model.
    """

    def __init__(self, reporter: MetricReporter, *, is_saved: bool) -> None:
        """Load the newest checkpoint, if checkpoints are saved at all."""
        self.rounds = 0
        self.model = None  # type: str | None
        self.reported_of_history = 0
        """The number of values in a history that the model contains, also those of a trial with other parameters."""
        self.is_inherited = False
        self._reporter = reporter
        self._is_saved = is_saved
        self._pid = os.getpid()
        path = nni_sdk.load_checkpoint() if is_saved else None
        if path is not None:
            with open(os.path.join(path, "training.json"), encoding="utf-8") as file:
                state = json.load(file)
            self.is_inherited = state["parameters"] != _parameters()
            if not self.is_inherited:
                self.rounds, reporter.final = state["rounds"], state["final"]
            # A checkpoint of an earlier version has no such count.
            self.reported_of_history = state.get("reported_of_history", state["rounds"])
            self.model = os.path.join(path, "model")

    def continue_in_this_process(self) -> None:
        """Load the checkpoint again if this process was started after that, by the framework: results continue where it ends."""
        if self._is_saved and self.model is not None and os.getpid() != self._pid:
            nni_sdk.load_checkpoint()

    def round_ended(
        self,
        save_model: "Callable[[str], object]",
        *,
        is_first: "bool | None" = None,
        takes_all: bool = False,
    ) -> None:
        """Save a checkpoint after a round that was reported. `save_model` writes the model to a path.

        `is_first`: True in the process that reports; None: as `is_first_process` tells. `takes_all`: all processes save together:
        each calls `save_model`, and the path is that of the first one.
        """
        self.rounds += 1
        if not self._is_saved:
            return
        if not (is_first_process() if is_first is None else is_first):
            if takes_all:
                save_model("")
            return

        def save(folder: str) -> None:
            save_model(os.path.join(folder, "model"))
            with open(os.path.join(folder, "training.json"), "w", encoding="utf-8") as file:
                state = {
                    "rounds": self.rounds,
                    "final": self._reporter.final,
                    "parameters": _parameters(),
                    "reported_of_history": self._reporter.reported_of_history,
                }
                json.dump(state, file)

        nni_sdk.save_checkpoint(save)


def _parameters() -> "Any":
    """Those of the trial, without the budget: a trial that Hyperband promotes continues its own training."""
    given = nni_sdk.get_current_parameter()
    return (
        {name: value for name, value in given.items() if name != "TRIAL_BUDGET"}
        if isinstance(given, dict)
        else given
    )
