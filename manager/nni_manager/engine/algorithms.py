"""The tuner and the assessor of an experiment, each in a thread of its own: they may take their time.

A tuner that does not learn and answers within a moment, again and again, is then asked without one: for trials that last a few
milliseconds, to change threads costs more than the answer.

What they raise is no bug of the manager's: it is posted, and the user is shown it.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from nni_manager.config.known_results import KnownResult
from nni_manager.config.model import ExperimentConfig
from nni_manager.domain.events import (
    AskAssessor,
    Event,
    ParametersSuggested,
    SearchSpaceChanged,
    TellAssessor,
    TrialRefused,
    TunerExhausted,
    TunerFailed,
    TunerNotReady,
)
from nni_manager.errors import UserMistake
from nni_manager.tuner.assessment import MOST_STEPS, Assessment, PastCourse
from nni_manager.tuner.base import Later, PastTrial, Suggestion, TrialResult, Tuner
from nni_manager.tuner.proposer import Proposer

log = logging.getLogger(__name__)

# As long as it takes to read a piece of what a keeper has sent: for so long may the engine's loop be held up.
_MOMENT_S = 0.002
_QUICK_ANSWERS = 3


class Algorithms:
    """Asks and tells what the domain's effects say, and posts the answers. Lives on the engine's loop."""

    def __init__(
        self,
        experiment_id: str,
        config: ExperimentConfig,
        make_tuner: Callable[[ExperimentConfig], Tuner],
        assessment: Assessment | None,
        post: Callable[[Event], None],
        new_trial_id: Callable[[], str],
    ) -> None:
        """`make_tuner` makes a fresh one for a configuration, `new_trial_id` an id that no trial has yet."""
        self._experiment_id = experiment_id
        self._config = config
        self._proposer = Proposer(config, make_tuner)
        self._tuner_thread = ThreadPoolExecutor(1, thread_name_prefix="tuner")
        self._assessment = assessment
        self._assessor_thread = ThreadPoolExecutor(1, thread_name_prefix="assessor")
        self._assessors_turn = asyncio.Lock()
        self._to_assess: dict[tuple[str, int], list[float]] = {}
        """What each attempt of a trial has reported and the assessor has not heard yet."""
        self._quick_answers = 0
        """How many proposals of the tuner in a row took a moment only."""
        self._took_here_s = 0.0
        """For how long the tuner has been asked on the loop, in this turn of it."""
        self._in_thread: list[Future[Any]] = []
        """What its thread was asked; some of it is answered."""
        self._tuner_failed: Exception | None = None
        """Why it could not be rebuilt."""
        self._assessor_failed: Exception | None = None
        self._post = post
        self._new_trial_id = new_trial_id

    @property
    def learns(self) -> bool:
        """Whether what the tuner proposes depends on results."""
        return self._proposer.learns

    async def restore(
        self,
        trials: Sequence[PastTrial],
        known: Sequence[KnownResult],
        courses: Callable[[], Iterable[PastCourse]],
    ) -> None:
        """Let both know what they knew before: the trials that the tuner proposed, and what came from elsewhere.

        `courses` reads what trials had reported, which only an assessor needs. One of the user's own that fails here fails again
        when it is asked first: trials that run are heard meanwhile.
        """
        try:
            await self._change(self._proposer.restore, trials, known)
        except UserMistake as error:
            self._tuner_failed = error
        if self._assessment is not None:
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._assessor_thread, self._assessment.restore, courses())
            except UserMistake as error:
                self._assessor_failed = error

    def close(self) -> None:
        """Ask and tell nothing more; what runs is not waited for, and ended where it can be."""
        self._proposer.close()
        if self._assessment is not None:
            self._assessment.close()
        self._tuner_thread.shutdown(wait=False, cancel_futures=True)
        self._assessor_thread.shutdown(wait=False, cancel_futures=True)

    async def ask(self, sequence_id: int) -> None:
        """Ask the tuner for the parameters of a trial."""
        if self._tuner_failed is not None:
            self._note_tuner_failure(self._tuner_failed, was_asked=True)
            return
        try:
            suggestion: Suggestion | Later | None = await self._answer(
                self._proposer.ask, sequence_id, is_proposal=True
            )
        except Exception as error:  # noqa: BLE001 - whatever a tuner raises is shown to the user
            self._note_tuner_failure(error, was_asked=True)
            return
        if suggestion is None:
            self._post(TunerExhausted())
            return
        if suggestion is Later.LATER:
            self._post(TunerNotReady(sequence_id))
            return
        self._post(
            ParametersSuggested(
                self._new_trial_id(), sequence_id, suggestion.parameters, suggestion.memo, time.time()
            )
        )

    async def tell(self, sequence_id: int, result: TrialResult) -> None:
        """Tell the tuner how a trial came out."""
        if self._tuner_failed is not None:
            return  # it is told when it has been mended, of all that is stored
        try:
            await self._answer(self._proposer.hear, sequence_id, result)
        except Exception as error:  # noqa: BLE001 - as above
            self._note_tuner_failure(error, was_asked=False)

    async def teach(self, results: Sequence[KnownResult]) -> int:
        """Let the tuner learn from results of parameters that it did not propose; how many of them it makes use of."""
        if self._tuner_failed is not None:
            return 0  # as above
        try:
            return int(await self._change(self._proposer.import_results, results))
        except Exception as error:  # noqa: BLE001 - as above
            self._note_tuner_failure(error, was_asked=False)
            return 0

    async def change_space(
        self, config: ExperimentConfig, known: Sequence[KnownResult], over: Collection[int]
    ) -> bool:
        """Let the tuner propose parameters of another search space from now on; False when it failed over that.

        See `Proposer.change_space`.
        """
        try:
            await self._change(self._proposer.change_space, config, known, over)
        except Exception as error:  # noqa: BLE001 - as above
            self._note_tuner_failure(error, was_asked=False)
            return False
        self._post(SearchSpaceChanged())
        return True

    async def assess(self, effect: AskAssessor) -> None:
        """Let the assessor hear what a trial has reported; it may refuse the trial. Reports that wait are heard together."""
        key = effect.trial_id, effect.attempt
        if (waiting := self._to_assess.get(key)) is not None:
            waiting += effect.values[: MOST_STEPS - len(waiting)]
            return
        self._to_assess[key] = list(effect.values)
        async with self._assessors_turn:
            values = self._to_assess.pop(key)
            may_go_on = await self._in_assessor_thread(lambda assessment: assessment.hear(*key, values))
        if may_go_on is False:
            log.info("trial %s: the assessor stops it", effect.trial_id)
            self._post(TrialRefused(effect.trial_id, effect.attempt, time.time()))

    async def tell_assessor(self, effect: TellAssessor) -> None:
        """Tell the assessor that a trial is final."""
        async with self._assessors_turn:
            await self._in_assessor_thread(
                lambda assessment: assessment.end(effect.trial_id, has_succeeded=effect.has_succeeded)
            )

    # ---- inside

    async def _in_assessor_thread(self, use: Callable[[Assessment], bool | None]) -> bool | None:
        """What the assessor answers; None when it failed, or there is none."""
        if self._assessment is None:
            return None
        if self._assessor_failed is not None:
            self._note_assessor_failure(self._assessor_failed)
            return None
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._assessor_thread, use, self._assessment
            )
        except Exception as error:  # noqa: BLE001 - as of a tuner
            self._note_assessor_failure(error)
            return None

    def _note_assessor_failure(self, error: Exception) -> None:
        name = "" if self._config.assessor is None else self._config.assessor.name
        self._note_failure("assessor", name, error)

    def _note_tuner_failure(self, error: Exception, *, was_asked: bool) -> None:
        self._note_failure("tuner", self._config.tuner.name, error, was_asked=was_asked)

    def _note_failure(self, what: str, name: str, error: Exception, *, was_asked: bool = False) -> None:
        # What failed in code of the user's own has its traceback in the message; ours would hide it.
        is_users = isinstance(error, UserMistake)
        text = str(error) if is_users else "".join(traceback.format_exception(error))
        log.error("the %s failed:\n%s", what, text)
        self._post(
            TunerFailed(
                f"the {what} {name} failed, and no more trials are begun; what it raised follows. "
                f"Mend it, then go on with `nnictl resume {self._experiment_id}`.\n{text}",
                was_asked,
            )
        )

    async def _answer(self, function: Callable[..., Any], *arguments: Any, is_proposal: bool = False) -> Any:
        """What the tuner answers; asked here if it has shown that it is quick, and has not held up the loop for a moment.

        That it hears of results in no time says nothing of its proposals.
        """
        ask = partial(_timed, function, *arguments)
        if self._is_quick and not self._is_in_thread and self._took_here_s < _MOMENT_S:
            if not self._took_here_s:
                asyncio.get_running_loop().call_soon(self._begin_turn)
            answer, took_s = ask()
            self._took_here_s += took_s
        else:
            answer, took_s = await self._in_tuner_thread(ask)
        if took_s > _MOMENT_S:
            self._quick_answers = 0
        elif is_proposal:
            self._quick_answers += 1
        return answer

    def _begin_turn(self) -> None:
        self._took_here_s = 0.0

    @property
    def _is_quick(self) -> bool:
        return not self.learns and self._quick_answers >= _QUICK_ANSWERS

    @property
    def _is_in_thread(self) -> bool:
        """Whether the tuner's thread has anything to do. That its asker was cancelled does not end what is under way."""
        return not all(asked.done() for asked in self._in_thread)

    async def _change(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Let the tuner become another, of which it is not known how quick it is."""
        try:
            return await self._in_tuner_thread(function, *arguments)
        finally:
            self._quick_answers = 0  # only now: what it was asked before counts for the tuner of before

    def _in_tuner_thread(self, function: Callable[..., Any], *arguments: Any) -> "asyncio.Future[Any]":
        asked = self._tuner_thread.submit(function, *arguments)
        self._in_thread = [*(each for each in self._in_thread if not each.done()), asked]
        return asyncio.wrap_future(asked)


def _timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What it returns, and how long that took."""
    began_s = time.monotonic()
    answer = function(*arguments)
    return answer, time.monotonic() - began_s
