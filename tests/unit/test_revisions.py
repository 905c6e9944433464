"""Which trials have changed since somebody looked."""

from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.change_log import ChangeLog


def test_what_changed_is_told_once_however_often_it_did():
    revisions = ChangeLog()
    for trial_id in ("a", "b", "a", "c"):
        revisions.note(trial_id)
    assert list(revisions.since(0)) == ["c", "a", "b"]
    assert list(revisions.since(2)) == ["c", "a"]
    assert list(revisions.since(revisions.latest)) == []
    assert (revisions.of("a"), revisions.of("nobody")) == (3, 0)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans())))
def test_who_asks_again_and_again_misses_nothing_and_hears_nothing_twice(steps):
    revisions, seen, missed = ChangeLog(), 0, set()
    for trial_id, is_asked in steps:
        revisions.note(trial_id)
        missed.add(trial_id)
        if is_asked:
            told = list(revisions.since(seen))
            assert sorted(told) == sorted(missed)
            seen, missed = revisions.latest, set()


def test_a_look_costs_what_is_new_and_not_what_there_is():
    revisions = ChangeLog()
    for number in range(10_000):
        revisions.note(str(number))
    since = revisions.latest
    revisions.note("7")

    class Counting(dict):
        looked = 0

        def __getitem__(self, name):
            Counting.looked += 1
            return super().__getitem__(name)

    revisions._of = Counting(revisions._of)
    assert list(revisions.since(since)) == ["7"]
    assert Counting.looked <= 3
