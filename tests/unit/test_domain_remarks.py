"""Tags and notes: their valid form, and changes that have no further effect when somebody repeats them."""

import contextlib
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.events import RemarksChanged, SaveRemarks
from nni_manager.domain.experiment import ExperimentCore, ExperimentState
from nni_manager.domain.objectives import MAXIMIZE
from nni_manager.domain.remarks import (
    MAX_NOTE_LENGTH,
    MAX_TAG_LENGTH,
    MAX_TAGS,
    NO_REMARKS,
    Remarks,
    RemarksChange,
    RemarksInvalid,
    tag_of,
)
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import Trial

TAGS = st.from_regex(r"[a-cA-C0-9][a-c_.:/-]{0,3}", fullmatch=True)
NOTES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=50)
CHANGES = st.builds(
    lambda add, remove, note: RemarksChange.of(add, set(remove) - set(add), note),
    st.lists(TAGS, max_size=5),
    st.lists(TAGS, max_size=5),
    st.none() | NOTES,
)


@pytest.mark.parametrize(
    "tag", ["keep", "lr/high", "v1.2", "a:b_c-d", "0", "好", "Größe", "x" * MAX_TAG_LENGTH]
)
def test_a_tag_may_contain_letters_and_digits_and_five_punctuation_characters(tag):
    assert tag_of(tag) == tag


@pytest.mark.parametrize(
    "text",
    ["", " ", "two words", "-x", "/x", "a,b", "<b>", "a\n", "a\x1b", "a\u202e", "x" * 65, "\ud800", None, 5],
)
def test_the_error_for_an_invalid_tag_contains_the_form_and_an_example(text):
    with pytest.raises(
        RemarksInvalid, match=r"^cannot use tag .*: a tag has 1 to 64 letters.*such as keep$"
    ) as refused:
        tag_of(text)
    assert len(str(refused.value)) < 300
    assert str(refused.value).isprintable()


@given(st.text())
def test_normalising_a_valid_tag_again_does_not_change_the_tag(text):
    try:
        tag = tag_of(text)
    except RemarksInvalid:
        return
    assert tag_of(tag) == tag
    assert len(tag.split()) == 1
    assert "," not in tag


def test_tags_that_differ_only_in_unicode_normalisation_are_equal():
    composed = "é"
    assert tag_of(unicodedata.normalize("NFD", composed)) == composed
    once = RemarksChange.of(add=["é"]).applied_to(NO_REMARKS)
    assert RemarksChange.of(remove=["e\u0301"]).applied_to(once) == NO_REMARKS


@given(CHANGES, CHANGES)
def test_a_change_of_tags_is_idempotent_and_leaves_the_tags_sorted_and_unique(first, change):
    before = first.applied_to(NO_REMARKS)
    after = change.applied_to(before)
    assert change.applied_to(after) == after
    assert list(after.tags) == sorted((set(before.tags) | set(change.add)) - set(change.remove))
    assert after.note == (before.note if change.note is None else change.note)


@given(CHANGES)
def test_a_change_of_remarks_survives_a_round_trip_through_json(change):
    assert RemarksChange.from_json(json.loads(json.dumps(change.to_json()))) == change


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["addTags", "removeTags", "note", "tags"]), inner, max_size=3)
        ),
    )
)
def test_any_json_document_is_either_refused_or_accepted_as_a_change_of_remarks(document):
    with contextlib.suppress(RemarksInvalid):
        RemarksChange.from_json(document).applied_to(NO_REMARKS)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"tags": ["keep"]}, r"the body is another document; send e\.g\."),
        ({"addTags": "keep"}, "the body is another document"),
        ({"addTags": ["a b"]}, "cannot use tag 'a b'"),
        ({"addTags": ["a"], "removeTags": ["a"]}, "cannot both add and remove tag a; leave one out"),
        (
            {"addTags": [f"t{n}" for n in range(MAX_TAGS + 1)]},
            "there would be 21 tags, and the limit is 20; remove",
        ),
        ({"note": "x" * (MAX_NOTE_LENGTH + 1)}, "a note of 10001 characters: the limit is 10000; shorten it"),
        ({"note": "a\0"}, "a note with the character"),
        ({"note": "\ud800"}, "a note with the character"),
    ],
)
def test_the_error_for_an_invalid_change_of_remarks_contains_the_limit_or_form(document, says):
    with pytest.raises(RemarksInvalid, match=says):
        RemarksChange.from_json(document).applied_to(NO_REMARKS)


def test_a_note_keeps_its_lines_and_loses_surrounding_blank_lines():
    assert RemarksChange.of(note="\n one\r\n two\n\n").note == "one\n two"


def test_a_note_of_the_maximum_length_is_accepted():
    assert RemarksChange.of(note="x" * MAX_NOTE_LENGTH).note == "x" * MAX_NOTE_LENGTH


def test_repeated_tags_and_replacements_are_accepted_if_a_trial_has_the_maximum_number_of_tags():
    full = Remarks.of([f"t{n:02d}" for n in range(MAX_TAGS)], "")
    assert RemarksChange.of(add=full.tags).applied_to(full) == full
    assert len(RemarksChange.of(add=["new"], remove=["t00"]).applied_to(full).tags) == MAX_TAGS


@pytest.mark.parametrize("state", ExperimentState)
def test_tags_and_notes_can_be_changed_in_every_experiment_state(state):
    experiment = ExperimentCore("TESTEXPT", Limits(1, 0, None, None, 0), MAXIMIZE, state=state)
    experiment.lifecycle.restore([Trial("aaaaa", 0, {}, {}, 0.0, "aaaaa")])
    ours, its = Remarks(("baseline",), ""), Remarks((), "late")
    seen = experiment.change_log.latest
    effects = experiment.handle(RemarksChanged(None, ours), 0.0) + experiment.handle(
        RemarksChanged("aaaaa", its), 0.0
    )
    assert [each for each in effects if isinstance(each, SaveRemarks)] == [
        SaveRemarks(None, ours),
        SaveRemarks("aaaaa", its),
    ]
    assert (experiment.remarks, experiment.trials["aaaaa"].remarks) == (ours, its)
    assert list(experiment.change_log.since(seen)) == ["aaaaa"]


def test_a_note_that_is_not_a_string_is_refused():
    with pytest.raises(RemarksInvalid, match="cannot use note 5: it is no text; write a text"):
        RemarksChange.of(note=5)
