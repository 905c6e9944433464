"""Who may ask the local OpenPAI: passwords, tokens, their ends, and what of them is stored."""

import base64
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.local_openpai.accounts import (
    MAX_TOKENS_OF_A_USER,
    Accounts,
    User,
    check_password,
    new_user,
    payload_of,
)
from nni_manager.local_openpai.errors import ApiError

ADA, BOB = User("ada", "00:00", True), User("bob", "00:00", False)


def accounts():
    return Accounts([ADA, BOB])


def code_of(call, *arguments):
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    return caught.value.code


def test_a_password_opens_and_another_does_not():
    user = new_user("ada", "pässwörd \ud800", is_admin=True)
    check_password(user, "pässwörd \ud800")
    assert code_of(check_password, user, "passwörd") == "IncorrectPasswordError"
    assert "ssw" not in user.password


def test_a_name_that_is_nobodys_takes_as_long_as_a_wrong_password_and_says_the_same():
    there = Accounts([new_user("ada", "ada's password", is_admin=True)])

    def refusal(name):
        begun_s = time.thread_time()
        with pytest.raises(ApiError) as caught:
            check_password(there.login(name), "another password")
        return time.thread_time() - begun_s, (caught.value.code, str(caught.value))

    def fastest(refusals):
        return min(took_s for took_s, _ in refusals)

    known, unknown = ([refusal(name) for _ in range(7)] for name in ("ada", "eve"))
    assert {str(said) for _, said in known} == {str(said) for _, said in unknown}
    assert 0.7 < fastest(unknown) / fastest(known) < 1.4


def test_the_owners_token_may_do_what_an_applications_may_not_and_is_told_apart_after_a_restart():
    there = accounts()
    text = there.issue("ada", 1000, None)
    there.make_owners(text)
    again = Accounts.from_json(there.to_json())
    assert again.caller(text, 2000).token.is_owners
    assert not again.caller(again.issue("ada", 2000, None), 2000).token.is_owners


@pytest.mark.parametrize(
    ("name", "password"),
    [
        ("", "secret"),
        ("a~b", "secret"),
        ("a/b", "secret"),
        ("ä", "secret"),
        ("n" * 65, "secret"),
        ("ada", "short"),
    ],
)
def test_a_name_or_a_password_that_nobody_can_have_is_refused(name, password):
    with pytest.raises(ApiError) as caught:
        new_user(name, password, is_admin=False)
    assert caught.value.code == "InvalidParametersError"
    assert password not in str(caught.value)


def test_a_token_says_to_its_holder_who_and_how_long():
    there = accounts()
    text = there.issue("ada", 1000.5, 60)
    header, payload, _ = text.split(".")
    said = [json.loads(base64.urlsafe_b64decode(part + "==")) for part in (header, payload)]
    assert said[0] == {"alg": "HS256", "typ": "JWT"}
    assert {**said[1], "jti": ""} == {
        "username": "ada",
        "application": False,
        "iat": 1000,
        "exp": 1060,
        "jti": "",
    }
    assert payload_of(there.caller(text, 1059.9)) == {
        "username": "ada",
        "application": False,
        "admin": True,
        "iat": 1000,
        "exp": 1060,
    }


def test_a_token_ends_when_it_said_and_an_applications_never():
    there = accounts()
    login, application = there.issue("bob", 1000, 60), there.issue("bob", 1000, None)
    assert there.caller(login, 1059.9).name == "bob"
    assert code_of(there.caller, login, 1060) == "UnauthorizedUserError"
    assert there.caller(application, 1e12).token.is_application


def test_nothing_that_is_stored_opens_anything():
    there = accounts()
    texts = [there.issue("ada", 1000, None), there.issue("bob", 1000, 60)]
    stored = there.to_json()
    for text in texts:
        assert text.rpartition(".")[2] not in stored
    for token in json.loads(stored)["tokens"]:
        for value in (token["text"], token["digest"]):
            assert code_of(there.caller, value, 1001) == "UnauthorizedUserError"
    back = Accounts.from_json(stored)
    assert [back.caller(text, 1001).name for text in texts] == ["ada", "bob"]


@given(st.text() | st.binary().map(lambda content: content.decode("latin-1")))
def test_no_other_text_is_a_token(text):
    there = accounts()
    whole = there.issue("ada", 1000, None)
    for wrong in (text, whole + text if text else "", text + whole if text else "", whole[:-1]):
        assert code_of(there.caller, wrong, 1001) == "UnauthorizedUserError"


def test_a_token_is_revoked_whole_or_as_it_is_listed_by_its_owner_or_an_administrator():
    there = accounts()
    ada, bob = (there.caller(there.issue(name, 1000, None), 1000) for name in ("ada", "bob"))
    for text_of in (lambda text: text, lambda text: text.rpartition(".")[0] + "."):
        mine, others = there.issue("bob", 1000, None), there.issue("ada", 1000, None)
        there.revoke(text_of(mine), bob)
        assert code_of(there.caller, mine, 1001) == "UnauthorizedUserError"
        assert code_of(there.revoke, text_of(others), bob) == "ForbiddenUserError"
        assert there.caller(others, 1001).name == "ada"
    assert code_of(there.revoke, mine, bob) == "NoTokenError"
    there.revoke(bob.token.text, ada)
    assert there.tokens_of("bob", 1001) == []


def test_a_program_that_logs_in_for_ever_keeps_its_newest_tokens_and_its_applications():
    there = accounts()
    application = there.issue("bob", 1000, None)
    texts = [there.issue("bob", 1000 + n, 600_000) for n in range(MAX_TOKENS_OF_A_USER + 5)]
    assert len(there.tokens_of("bob", 2000)) == MAX_TOKENS_OF_A_USER + 1
    assert [code_of(there.caller, text, 2100) for text in texts[:5]] == ["UnauthorizedUserError"] * 5
    assert all(there.caller(text, 2100) for text in (application, texts[5], texts[-1]))
    # Those that have ended are forgotten with the next one.
    there.issue("bob", 1e9, 60)
    assert len(json.loads(there.to_json())["tokens"]) == 2


def test_with_a_user_go_all_their_tokens_and_the_last_administrator_stays():
    there = accounts()
    text = there.issue("bob", 1000, None)
    there.remove_user("bob")
    assert code_of(there.caller, text, 1001) == "UnauthorizedUserError"
    assert code_of(there.user, "bob") == "NoUserError"
    assert code_of(there.remove_user, "ada") == "ForbiddenUserError"
    assert [user.name for user in there.users()] == ["ada"]
    assert code_of(there.add_user, ADA) == "ConflictUserError"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"users": [{}], "tokens": []}', '{"users": 1, "tokens": []}']
)
def test_what_is_no_list_of_accounts_is_not_taken_for_one(text):
    with pytest.raises(ValueError, match=r"."):
        Accounts.from_json(text)


class _Steps:
    issue = st.tuples(st.just("issue"), st.sampled_from(["ada", "bob"]), st.none() | st.integers(60, 600))
    revoke = st.tuples(st.just("revoke"), st.integers(0, 30))
    move = st.tuples(st.just("move"), st.integers(1, 400))
    restart = st.tuples(st.just("restart"))


@given(st.lists(st.one_of(_Steps.issue, _Steps.revoke, _Steps.move, _Steps.restart), max_size=30))
def test_exactly_those_tokens_open_that_were_issued_and_have_neither_ended_nor_been_revoked(steps):
    there, now_s, model = accounts(), 1000, {}
    for step in steps:
        match step:
            case ("issue", name, lifetime_s):
                model[there.issue(name, now_s, lifetime_s)] = (name, lifetime_s and now_s + lifetime_s)
            case ("revoke", number):
                alive = list(model)[number : number + 1]
                for text in alive:
                    name, ends_s = model.pop(text)
                    if ends_s is None or now_s < ends_s:
                        there.revoke(text, there.caller(text, now_s))
            case ("move", by_s):
                now_s += by_s
            case ("restart",):
                there = Accounts.from_json(there.to_json())
        for text, (name, ends_s) in model.items():
            if ends_s is None or now_s < ends_s:
                assert there.caller(text, now_s).name == name
            else:
                assert code_of(there.caller, text, now_s) == "UnauthorizedUserError"
