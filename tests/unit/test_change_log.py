"""The change log: the trials that changed since a revision."""

from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.change_log import ChangeLog


def test_a_trial_with_many_changes_is_listed_once():
    revisions = ChangeLog()
    for trial_id in ("a", "b", "a", "c"):
        revisions.note(trial_id)
    assert list(revisions.since(0)) == ["c", "a", "b"]
    assert list(revisions.since(2)) == ["c", "a"]
    assert list(revisions.since(revisions.latest)) == []
    assert (revisions.of("a"), revisions.of("nobody")) == (3, 0)


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
