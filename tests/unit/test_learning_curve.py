"""The learning curve of a trial whose attempts continue from checkpoints: the result of each step once, in order."""

import json
from itertools import chain

import pytest
from attempts import RegisteringStore, attempt_id, metrics_of
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_search import new_search

from nni_manager.domain import events
from nni_manager.domain.ingest import AttemptIngest
from nni_manager.domain.learning_curve import (
    NO_END,
    InheritedResults,
    LearningCurve,
    Segment,
    StoredMark,
    curve_of,
    first_of_load,
)
from nni_manager.domain.trial import Trial
from nni_manager.domain.trial_run import OFFSET_OF_INHERITED, TrialRun
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import trial_row
from nni_sdk.frame import frame, frame_head
from nni_sdk.records import decode
from trial_keeper.wire.messages import AttemptKey, Stream

TASK = "main-0"


def key_of(number, trial_id="t", task=TASK):
    return AttemptKey(trial_id, attempt_id(number), task)


def saved(attempt, offset, name="1", task=TASK):
    return StoredMark(attempt, attempt_id(attempt), task, offset, name)


def continued(attempt, offset, source, name="1", load="", task=TASK):
    return StoredMark(attempt, attempt_id(attempt), task, offset, name, source, load or f"{attempt}-{offset}")


def test_a_learning_curve_has_only_results_of_the_last_attempt_if_no_checkpoint_exists():
    assert curve_of("t", [], 3, TASK) == LearningCurve((Segment(3, TASK),))


def test_a_learning_curve_has_the_results_up_to_the_checkpoint_and_then_those_of_the_second_attempt():
    marks = [saved(0, 100), saved(0, 300, "2"), continued(2, 0, key_of(0))]
    assert curve_of("t", marks, 2, TASK) == LearningCurve((Segment(0, TASK, -1, 100), Segment(2, TASK, 0)))


def test_reloading_a_checkpoint_removes_later_results_from_the_curve():
    marks = [saved(0, 100), continued(0, 300, key_of(0))]
    assert curve_of("t", marks, 0, TASK).segments == (Segment(0, TASK, -1, 100), Segment(0, TASK, 300))


def test_results_are_kept_if_several_forked_processes_record_the_same_checkpoint_load():
    source = key_of(0)
    marks = [saved(0, 9), continued(1, 0, source, load="a"), continued(1, 50, source, load="a")]
    assert curve_of("t", marks, 1, TASK).segments[-1] == Segment(1, TASK, 0)
    assert first_of_load(marks, 1, TASK, "a") == 0


def test_a_checkpoint_of_a_different_trial_or_task_starts_a_new_curve():
    for source in (key_of(0, "parent"), key_of(0, task="worker-1")):
        marks = [saved(0, 100), continued(1, 40, source)]
        assert curve_of("t", marks, 1, TASK) == LearningCurve((Segment(1, TASK, 40),))


def test_a_checkpoint_that_is_not_stored_yet_is_reported_as_missing():
    assert curve_of("t", [continued(1, 0, key_of(0))], 1, TASK) == LearningCurve(
        (Segment(1, TASK, 0),), key_of(0)
    )


def test_the_part_of_a_curve_up_to_an_attempt_ends_with_the_last_segment_of_that_attempt():
    first, reloaded, later = Segment(0, TASK, -1, 100), Segment(0, TASK, 300, 400), Segment(1, TASK, 0)
    curve = LearningCurve((first, reloaded, later))
    assert curve.up_to(0, TASK) == (first, reloaded)
    assert curve.up_to(1, TASK) == curve.up_to(2, TASK) == ()


def test_a_curve_is_finite_even_if_forged_records_let_two_attempts_continue_from_each_other():
    marks = [continued(0, 0, key_of(1)), saved(0, 10), continued(1, 0, key_of(0)), saved(1, 10)]
    assert len(curve_of("t", marks, 1, TASK).segments) <= 4


class CountedMarks(list):
    """Marks that count how often they are read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


@pytest.mark.parametrize("loads", [1, 300])
def test_a_learning_curve_reads_the_checkpoint_marks_only_twice_for_any_number_of_segments(loads):
    marks = CountedMarks()
    for n in range(loads):
        marks += [saved(0, 10 * n, str(n)), continued(0, 10 * n + 5, key_of(0), str(n))]
    assert len(curve_of("t", marks, 0, TASK).segments) == loads + 1
    assert marks.reads == 2


KEYS = st.builds(key_of, st.integers(0, 3), st.sampled_from("tp"))
MARKS = st.one_of(
    st.builds(saved, st.integers(0, 3), st.integers(0, 20), st.sampled_from("12")),
    st.builds(
        continued, st.integers(0, 3), st.integers(0, 20), KEYS, st.sampled_from("12"), st.sampled_from("ab")
    ),
)


@given(st.lists(MARKS, max_size=12))
def test_a_curve_is_finite_for_any_sequence_of_checkpoint_records(marks):
    marks.sort(key=lambda mark: (mark.attempt, mark.offset))
    segments = curve_of("t", marks, 3, TASK).segments
    assert segments[-1].end_offset == NO_END
    assert len(segments) <= len(marks) + 1


class Training:
    """Training code that reports each step, saves checkpoints, and is killed.

    `streams` has the metrics stream that nni_sdk would write for each attempt.
    """

    def __init__(self):
        self.streams = {}
        self.checkpoint = None
        self.saves = 0

    def attempt(self, number, actions, task=TASK):
        """Run one attempt. Returns the number of steps since the start of the training."""
        stream, step = bytearray(), 0
        if self.checkpoint is not None:
            source, name, step = self.checkpoint
            names = {
                "trial_id": "t",
                "attempt_id": source,
                "task": task,
                "checkpoint": name,
                "load": str(number),
            }
            stream += self._frame("CONTINUED", json.dumps(names))
        for action in actions:
            if action == "step":
                stream += self._frame("PERIODICAL", str(step))
                step += 1
            elif action == "save":
                self.saves += 1
                stream += self._frame("CHECKPOINT", json.dumps(str(self.saves)))
                self.checkpoint = attempt_id(number), str(self.saves), step
        self.streams[number] = bytes(stream)
        return step

    def _frame(self, type_, value):
        return frame(frame_head(0, "t", type_), 0, value)


@pytest.fixture(scope="module")
def new_store(tmp_path_factory):
    made = []

    def make():
        folder = tmp_path_factory.mktemp("store")
        made.append(RegisteringStore.create(folder / "db", folder, "EXPERIMT", "{}", b"secret", 1.0))
        made.append(StoreReader(folder / "db"))
        return made[-2:]

    yield make
    for each in reversed(made):
        each.close()


def store_streams(store, streams, size):
    """Store each attempt's stream in pieces of `size` bytes."""
    for number, data in streams.items():
        ingest = AttemptIngest(key_of(number))
        for offset in range(0, len(data), size):
            for write in ingest.take(Stream.METRICS, offset, data[offset : offset + size]):
                store.commit([write], 1.0)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["step", "step", "save"]), max_size=6), min_size=1, max_size=5),
    st.integers(1, 500),
    st.booleans(),
)
def test_each_step_is_counted_only_once_even_if_the_training_is_killed_repeatedly(
    new_store, attempts, size, is_late
):
    training = Training()
    for number, actions in enumerate(attempts):
        reached = training.attempt(number, actions)
    last = len(attempts) - 1
    store, reader = new_store()
    store.commit([trial_row(Trial("t", 0, {}, {}, 1.0, "t", run=TrialRun(attempt=last, reporter=TASK)))], 1.0)
    # The store numbers attempts in the order of their registration. So all attempts are registered in order, before their metrics
    # are stored in any order.
    for number in training.streams:
        store.commit([AttemptIngest(key_of(number)).take(Stream.STDOUT, 0, b"x")[0]], 1.0)
    order = dict(reversed(training.streams.items())) if is_late else training.streams
    store_streams(store, order, size)
    assert [row.value for row in metrics_of(reader, "t")] == [str(step) for step in range(reached)]
    (trial,) = reader.trials()
    newest = str(reached - 1) if reached else None
    assert (trial.run.intermediate_count, trial.run.intermediate) == (reached, newest)
    assert [row.value for row in reader.latest_intermediates()] == ([newest] if reached else [])
    assert list(chain.from_iterable(reader.metric_pages(True))) == []


def test_metrics_of_all_trials_are_read_in_the_order_of_trials_and_steps(new_store):
    store, reader = new_store()
    training = Training()
    training.attempt(0, ["step"] * 150 + ["save", "step"])
    training.attempt(1, ["step"] * 150)
    for number, trial_id in enumerate("atz"):
        store.commit(
            [
                trial_row(
                    Trial(
                        trial_id,
                        number,
                        {},
                        {},
                        1.0,
                        "",
                        run=TrialRun(attempt=int(trial_id == "t"), reporter=TASK),
                    )
                )
            ],
            1,
        )
    store_streams(store, training.streams, 10**6)
    for trial_id in "az":
        data = frame(frame_head(0, trial_id, "PERIODICAL"), 0, "0.5") * 120
        store.commit(AttemptIngest(key_of(0, trial_id)).take(Stream.METRICS, 0, data), 1.0)
    rows = reader.metrics()
    assert [row.trial_id for row in rows] == ["a"] * 120 + ["t"] * 300 + ["z"] * 120
    assert [row.value for row in rows if row.trial_id == "t"] == [str(step) for step in range(300)]
    assert [row.attempt for row in rows if row.trial_id == "t"] == [0] * 150 + [1] * 150


def test_checkpoint_records_of_a_trial_are_stored_up_to_a_limit(new_store):
    store, reader = new_store()
    training = Training()
    training.attempt(0, ["save", "step"])
    first = training.streams[0]
    source = {"trial_id": "t", "attempt_id": attempt_id(0), "task": TASK, "checkpoint": "1"}
    loads = b"".join(training._frame("CONTINUED", json.dumps(source | {"load": str(n)})) for n in range(1200))
    training.attempt(0, ["save", "step"] * 150)
    store_streams(store, {0: first + loads + training.streams[0]}, 10_000)
    marks = reader.marks("t")
    saves = [int(mark.checkpoint) for mark in marks if mark.source is None]
    # The first checkpoint is kept because a process continued from it. Of the other checkpoints, the newest are kept.
    assert saves == [1, *range(52, 152)]
    assert len([mark for mark in marks if mark.source is not None]) == 1000


@pytest.mark.parametrize("name", ["trial_id", "attempt_id", "task"])
@pytest.mark.parametrize("value", ["", "../x", "a/b", "a\0b", ".."])
def test_a_continuation_record_is_invalid_if_one_of_its_ids_cannot_be_a_folder_name(name, value):
    source = {"trial_id": "t", "attempt_id": attempt_id(0), "task": TASK, "checkpoint": "1", "load": "0"}
    valid = Training()._frame("CONTINUED", json.dumps(source))
    invalid = Training()._frame("CONTINUED", json.dumps(source | {name: value}))
    found = decode(valid + invalid, 0)
    assert ([mark.task for mark in found.marks], len(found.garbage)) == ([TASK], 1)


# ---- the trial in the manager's memory


def running():
    search = new_search(concurrency=1)
    search.start(search.suggest())
    key = search.trial("t0").attempts["main"].key
    search.handle(events.TaskReported(key))
    return search, key


def test_a_continuing_attempt_has_the_results_before_the_checkpoint():
    search, key = running()
    effects = search.handle(events.AttemptContinued(key, InheritedResults(2, "0.2", (0.1, 0.2), "0.9")))
    trial = search.trial("t0")
    assert (trial.run.intermediate_count, trial.run.intermediate, trial.run.value) == (2, "0.2", 0.9)
    assert trial.run.final_offset == OFFSET_OF_INHERITED
    assert events.AskAssessor("t0", 0, 0, (0.1, 0.2)) in effects
    search.handle(events.MetricsStored(key, ((False, "0.3"),)))
    assert (trial.run.intermediate_count, trial.run.intermediate) == (3, "0.3")


def test_a_different_task_or_an_ended_trial_inherits_no_results():
    search, key = running()
    inherited = InheritedResults(2, "0.2", (0.1, 0.2), "0.9")
    assert (
        search.handle(events.AttemptContinued(AttemptKey("t0", key.attempt_id, "other"), inherited))[1:] == []
    )
    search.end("t0")
    search.deliver("t0")
    assert search.handle(events.AttemptContinued(key, inherited)) == []
    assert search.trial("t0").run.final is None


def test_late_stored_results_of_an_earlier_attempt_precede_the_new_results():
    search, key = running()
    source = AttemptKey("t0", attempt_id(0), key.task)
    effects = search.handle(events.AttemptContinued(key, InheritedResults(), missing=source))
    assert events.DrainSource(source) in effects
    search.handle(events.MetricsStored(key, ((False, "0.3"), (True, "1"))))
    search.handle(events.AttemptContinued(key, InheritedResults(2, "0.2", (0.1, 0.2), "0.9"), is_late=True))
    trial = search.trial("t0")
    assert (trial.run.intermediate_count, trial.run.intermediate, trial.run.final) == (3, "0.3", "1")


def test_the_results_before_a_reloaded_checkpoint_are_not_assessed_again():
    search, key = running()
    search.handle(events.MetricsStored(key, ((False, "0.1"), (False, "0.2"), (True, "1"))))
    effects = search.handle(events.AttemptContinued(key, InheritedResults(1, "0.1", (0.1,))))
    trial = search.trial("t0")
    assert (trial.run.intermediate_count, trial.run.intermediate, trial.run.final) == (1, "0.1", None)
    assert trial.run.is_feasible
    assert not [effect for effect in effects if isinstance(effect, events.AskAssessor)]
