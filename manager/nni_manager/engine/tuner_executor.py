"""Runs the tuner and the assessor of an experiment in one thread each, so that slow ones do not block the engine.

A tuner that does not learn from results is called on the engine's loop, once it has answered quickly several times in a row. For
trials of a few milliseconds, a thread switch costs more than the answer.

Exceptions of tuner and assessor are posted as events and shown to the user: they are not bugs of the manager.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from nni_manager.config.model import ExperimentSpec
from nni_manager.config.prior_results import PriorResult
from nni_manager.domain import events
from nni_manager.domain.events import Event
from nni_manager.domain.message_summary import BEFORE_AN_ERROR
from nni_manager.errors import UserError
from nni_manager.tuner.assessment import MAX_STEPS, Assessment, PastLearningCurve
from nni_manager.tuner.base import BaseTuner, Later, Observation, PastTrial, Suggestion
from nni_manager.tuner.tuner_session import TunerSession

log = logging.getLogger(__name__)

# The longest time the engine's loop may be blocked: as long as reading a chunk from a keeper takes.
_MOMENT_S = 0.002
_QUICK_ANSWERS = 3


class TunerExecutor:
    """Performs the effects for tuner and assessor, and posts their answers. Runs on the engine's loop."""

    def __init__(
        self,
        experiment_id: str,
        config: ExperimentSpec,
        make_tuner: Callable[[ExperimentSpec], BaseTuner],
        assessment: Assessment | None,
        post: Callable[[Event], None],
        new_trial_id: Callable[[], str],
    ) -> None:
        """`make_tuner` creates a tuner for a configuration; `new_trial_id` returns an unused trial id."""
        self._experiment_id = experiment_id
        self._config = config
        self._session = TunerSession(config, make_tuner)
        self._tuner_thread = ThreadPoolExecutor(1, thread_name_prefix="tuner")
        self._assessment = assessment
        self._assessor_thread = ThreadPoolExecutor(1, thread_name_prefix="assessor")
        self._assessors_turn = asyncio.Lock()
        self._to_assess: dict[tuple[str, int], list[float]] = {}
        """The intermediate results of each attempt that the assessor has not received yet."""
        self._quick_answers = 0
        """The number of consecutive proposals within `_MOMENT_S`."""
        self._took_here_s = 0.0
        """The time spent in the tuner during the current iteration of the loop."""
        self._in_thread: list[Future[Any]] = []
        """The calls submitted to the tuner's thread; some may be done."""
        self._tuner_failed: Exception | None = None
        """The error of a failed restore of the tuner; None: no error."""
        self._assessor_failed: Exception | None = None
        self._post = post
        self._new_trial_id = new_trial_id

    @property
    def learns(self) -> bool:
        """True if the tuner's proposals depend on results."""
        return self._session.learns

    async def restore(
        self,
        trials: Sequence[PastTrial],
        known: Sequence[PriorResult],
        learning_curves: Callable[[], Iterable[PastLearningCurve]],
    ) -> None:
        """Restore tuner and assessor: `trials` were proposed by the tuner, `known` results come from elsewhere.

        `learning_curves` is called only for an assessor. A failure of the user's own code here is reported at its next call, so
        running trials are still followed until then.
        """
        try:
            await self._change(self._session.restore, trials, known)
        except UserError as error:
            self._tuner_failed = error
        if self._assessment is not None:
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._assessor_thread, self._assessment.restore, learning_curves())
            except UserError as error:
                self._assessor_failed = error

    def close(self) -> None:
        """Make no more calls. A running call is not awaited, and is ended if possible."""
        self._session.close()
        if self._assessment is not None:
            self._assessment.close()
        self._tuner_thread.shutdown(wait=False, cancel_futures=True)
        self._assessor_thread.shutdown(wait=False, cancel_futures=True)

    async def ask(self, sequence_id: int) -> None:
        """Ask the tuner for the parameters of a trial."""
        with self._failures_shown(was_asked=True):
            if self._tuner_failed is not None:
                raise self._tuner_failed
            suggestion: Suggestion | Later | None = await self._answer(
                self._session.ask, sequence_id, is_proposal=True
            )
            if suggestion is None:
                self._post(events.TunerExhausted(sequence_id))
            elif suggestion is Later.LATER:
                self._post(events.TunerNotReady(sequence_id))
            else:
                trial_id, at_s = self._new_trial_id(), time.time()
                parameters, metadata = suggestion.parameters, suggestion.metadata
                self._post(
                    events.ParametersSuggested(
                        trial_id, sequence_id, parameters, metadata, at_s, suggestion.continues
                    )
                )

    async def tell(self, sequence_id: int, result: Observation) -> None:
        """Send the result of a trial to the tuner."""
        if self._tuner_failed is None:  # a repaired tuner gets all stored results after a resume
            with self._failures_shown():
                await self._answer(self._session.tell_result, sequence_id, result)

    async def teach(self, results: Sequence[PriorResult]) -> int:
        """Add results of parameters that the tuner did not propose. Returns the number of results that the tuner uses."""
        if self._tuner_failed is None:  # as above
            with self._failures_shown():
                return int(await self._change(self._session.import_results, results))
        return 0

    async def change_space(
        self, config: ExperimentSpec, known: Sequence[PriorResult], over: Collection[int]
    ) -> bool:
        """Change the search space of the tuner; False if the tuner failed.

        See `TunerSession.change_space`.
        """
        is_done = False
        with self._failures_shown():
            await self._change(self._session.change_space, config, known, over)
            self._post(events.SearchSpaceChanged())
            is_done = True
        return is_done  # noqa: RET504 - the block swallows exceptions

    async def assess(self, effect: events.AskAssessor) -> None:
        """Send intermediate results to the assessor, which may stop the trial early. Waiting results are sent together."""
        key = effect.trial_id, effect.attempt
        if (waiting := self._to_assess.get(key)) is not None:
            waiting += effect.values[: MAX_STEPS - len(waiting)]
            return
        self._to_assess[key] = list(effect.values)
        async with self._assessors_turn:
            values = self._to_assess.pop(key)
            if self._assessment is None:
                await self._report_to_advisor(effect, values)
                return
            may_go_on = await self._in_assessor_thread(lambda assessment: assessment.report(*key, values))
        if may_go_on is False:
            log.info("trial %s: stopped early by the assessor", effect.trial_id)
            self._post(events.EarlyStopRequested(effect.trial_id, effect.attempt, time.time()))

    async def tell_assessor(self, effect: events.TellAssessor) -> None:
        """Notify the assessor that a trial is terminal."""
        async with self._assessors_turn:
            await self._in_assessor_thread(
                lambda assessment: assessment.end(effect.trial_id, has_succeeded=effect.has_succeeded)
            )

    # ---- internals

    async def _report_to_advisor(self, effect: events.AskAssessor, values: Sequence[float]) -> None:
        if self._tuner_failed is None:
            with self._failures_shown():
                await self._answer(self._session.report, effect.sequence_id, effect.trial_id, values)

    async def _in_assessor_thread(self, use: Callable[[Assessment], bool | None]) -> bool | None:
        """The answer of the assessor; None if it failed or there is none."""
        if self._assessment is None:
            return None
        answer: bool | None = None
        with self._failures_shown("assessor"):
            if self._assessor_failed is not None:
                raise self._assessor_failed
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._assessor_thread, use, self._assessment)
        return answer  # noqa: RET504 - the block swallows exceptions

    @contextmanager
    def _failures_shown(self, what: str = "tuner", *, was_asked: bool = False) -> Iterator[None]:
        """Show the user whatever the tuner or the assessor raises."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the user's own code may raise anything
            self._note_failure(what, error, was_asked)

    def _note_failure(self, what: str, error: Exception, was_asked: bool) -> None:
        # An error in the user's own code has its traceback in the message; ours would hide it.
        is_users = isinstance(error, UserError)
        text = str(error) if is_users else "".join(traceback.format_exception(error))
        log.error("the %s failed:\n%s", what, text)
        algorithm = self._config.tuner if what == "tuner" else self._config.assessor
        message = (
            f"the {what} {algorithm.name if algorithm else ''} failed, and no more trials are started. Fix it, end "
            f"the manager with `nnictl stop {self._experiment_id}` if it still runs, and resume with "
            f"`nnictl resume {self._experiment_id}`.{BEFORE_AN_ERROR}\n{text}"
        )
        self._post(events.TunerFailed(message, was_asked))

    async def _answer(self, function: Callable[..., Any], *arguments: Any, is_proposal: bool = False) -> Any:
        """The answer of the tuner. A quick tuner is called on the loop, unless it has used its time in this iteration.

        Only proposals count as evidence that the tuner is quick, not calls that send results.
        """
        ask = partial(_timed, function, *arguments)
        is_quick = not self.learns and self._quick_answers >= _QUICK_ANSWERS
        # Cancelling a caller does not end its call in the thread.
        thread_is_idle = all(asked.done() for asked in self._in_thread)
        if is_quick and thread_is_idle and self._took_here_s < _MOMENT_S:
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
        for trial_id in self._session.take_stops():
            log.info("trial %s: stopped early by the advisor", trial_id)
            self._post(events.EarlyStopRequested(trial_id, None, time.time()))
        return answer

    def _begin_turn(self) -> None:
        self._took_here_s = 0.0

    async def _change(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that changes the tuner, and measure its speed again afterwards."""
        try:
            return await self._in_tuner_thread(function, *arguments)
        finally:
            self._quick_answers = 0  # after the change: earlier calls measured the previous tuner

    def _in_tuner_thread(self, function: Callable[..., Any], *arguments: Any) -> "asyncio.Future[Any]":
        asked = self._tuner_thread.submit(function, *arguments)
        self._in_thread = [*(each for each in self._in_thread if not each.done()), asked]
        return asyncio.wrap_future(asked)


def _timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result of the function, and the seconds it took."""
    began_s = time.monotonic()
    answer = function(*arguments)
    return answer, time.monotonic() - began_s
