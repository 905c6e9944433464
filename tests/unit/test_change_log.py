"""The change log: the trials that changed since a revision."""

from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st
from simulated_search import new_search

from nni_manager.domain.change_log import ChangeLog
from nni_manager.domain.events import (
    AttemptEnded,
    AttemptStarted,
    MetricsStored,
    ParametersSuggested,
    ProblemFound,
    TaskReported,
    TimePassed,
)
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.reasons import ExitReason


def test_a_trial_with_many_changes_is_listed_once():
    revisions = ChangeLog()
    for trial_id in ("a", "b", "a", "c"):
        revisions.note(trial_id)
    assert list(revisions.since(0)) == ["c", "a", "b"]
    assert list(revisions.since(2)) == ["c", "a"]
    assert list(revisions.since(revisions.latest)) == []
    assert (revisions.of("a"), revisions.of("nobody")) == (3, 0)


def test_the_change_log_lists_a_trial_after_each_report_of_its_keeper_and_each_stored_change():
    search = new_search(concurrency=1)
    changes, key = search.experiment.change_log, AttemptKey("t0", attempt_id(0), "main")

    def has_changed(event):
        before = changes.latest
        search.handle(event)
        return list(changes.since(before)) == ["t0"]

    assert has_changed(ParametersSuggested("t0", search.requests.pop(), {}, {}, 1.0))
    assert has_changed(AttemptStarted(key, 2.0))
    assert has_changed(TaskReported(key))
    assert has_changed(MetricsStored(key, ((False, "0.5"),)))
    assert has_changed(AttemptEnded(TrialEnded(key, ExitReason.SUCCEEDED, 0, 2.0, 3.0)))
    assert has_changed(AttemptEnded(TrialEnded(key, ExitReason.SUCCEEDED, 0, 2.0, 3.0))), "a repeated report"
    assert has_changed(ProblemFound("t0", "it is slow"))
    assert not has_changed(TimePassed())


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans())))
def test_repeated_polls_of_the_change_log_return_every_change_exactly_once(steps):
    revisions, seen, missed = ChangeLog(), 0, set()
    for trial_id, is_asked in steps:
        revisions.note(trial_id)
        missed.add(trial_id)
        if is_asked:
            changes = list(revisions.since(seen))
            assert sorted(changes) == sorted(missed)
            seen, missed = revisions.latest, set()


def test_a_poll_of_the_change_log_reads_only_new_changes():
    revisions = ChangeLog()
    for number in range(10_000):
        revisions.note(str(number))
    since = revisions.latest
    revisions.note("7")

    class Counting(dict):
        reads = 0

        def __getitem__(self, name):
            Counting.reads += 1
            return super().__getitem__(name)

    revisions._of = Counting(revisions._of)
    assert list(revisions.since(since)) == ["7"]
    assert Counting.reads <= 3
