"""Accounts of local OpenPAI: passwords, tokens, their expiry, and their storage."""

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


def test_only_the_correct_password_is_accepted():
    user = new_user("ada", "pässwörd \ud800", is_admin=True)
    check_password(user, "pässwörd \ud800")
    assert code_of(check_password, user, "passwörd") == "IncorrectPasswordError"
    assert "ssw" not in user.password


@pytest.mark.slow
def test_an_unknown_user_and_a_wrong_password_are_refused_with_equal_errors_in_equal_time():
    store = Accounts([new_user("ada", "ada's password", is_admin=True)])

    def refusal(name):
        started_s = time.thread_time()
        with pytest.raises(ApiError) as caught:
            check_password(store.login(name), "another password")
        return time.thread_time() - started_s, (caught.value.code, str(caught.value))

    def fastest(refusals):
        return min(took_s for took_s, _ in refusals)

    known, unknown = ([refusal(name) for _ in range(7)] for name in ("ada", "eve"))
    assert {str(message) for _, message in known} == {str(message) for _, message in unknown}
    assert 0.7 < fastest(unknown) / fastest(known) < 1.4


def test_the_owner_token_stays_marked_as_owner_token_after_a_restart():
    store = accounts()
    text = store.issue("ada", 1000, None)
    store.make_owners(text)
    again = Accounts.from_json(store.to_json())
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
def test_an_invalid_user_name_or_password_is_rejected(name, password):
    with pytest.raises(ApiError) as caught:
        new_user(name, password, is_admin=False)
    assert caught.value.code == "InvalidParametersError"
    assert password not in str(caught.value)


def test_a_token_contains_its_user_and_expiry():
    store = accounts()
    text = store.issue("ada", 1000.5, 60)
    header, payload, _ = text.split(".")
    message = [json.loads(base64.urlsafe_b64decode(part + "==")) for part in (header, payload)]
    assert message[0] == {"alg": "HS256", "typ": "JWT"}
    assert {**message[1], "jti": ""} == {
        "username": "ada",
        "application": False,
        "iat": 1000,
        "exp": 1060,
        "jti": "",
    }
    assert payload_of(store.caller(text, 1059.9)) == {
        "username": "ada",
        "application": False,
        "admin": True,
        "iat": 1000,
        "exp": 1060,
    }


def test_a_login_token_expires_and_an_application_token_does_not():
    store = accounts()
    login, application = store.issue("bob", 1000, 60), store.issue("bob", 1000, None)
    assert store.caller(login, 1059.9).name == "bob"
    assert code_of(store.caller, login, 1060) == "UnauthorizedUserError"
    assert store.caller(application, 1e12).token.is_application


def test_the_stored_form_of_a_token_is_not_accepted_as_a_token():
    store = accounts()
    texts = [store.issue("ada", 1000, None), store.issue("bob", 1000, 60)]
    stored = store.to_json()
    for text in texts:
        assert text.rpartition(".")[2] not in stored
    for token in json.loads(stored)["tokens"]:
        for value in (token["text"], token["digest"]):
            assert code_of(store.caller, value, 1001) == "UnauthorizedUserError"
    back = Accounts.from_json(stored)
    assert [back.caller(text, 1001).name for text in texts] == ["ada", "bob"]


@given(st.text() | st.binary().map(lambda content: content.decode("latin-1")))
def test_any_text_that_is_not_an_issued_token_is_rejected(text):
    store = accounts()
    whole = store.issue("ada", 1000, None)
    for wrong in (text, whole + text if text else "", text + whole if text else "", whole[:-1]):
        assert code_of(store.caller, wrong, 1001) == "UnauthorizedUserError"


def test_only_the_owner_or_an_administrator_can_revoke_a_token():
    store = accounts()
    ada, bob = (store.caller(store.issue(name, 1000, None), 1000) for name in ("ada", "bob"))
    for text_of in (lambda text: text, lambda text: text.rpartition(".")[0] + "."):
        mine, others = store.issue("bob", 1000, None), store.issue("ada", 1000, None)
        store.revoke(text_of(mine), bob)
        assert code_of(store.caller, mine, 1001) == "UnauthorizedUserError"
        assert code_of(store.revoke, text_of(others), bob) == "ForbiddenUserError"
        assert store.caller(others, 1001).name == "ada"
    assert code_of(store.revoke, mine, bob) == "NoTokenError"
    store.revoke(bob.token.text, ada)
    assert store.tokens_of("bob", 1001) == []


def test_only_the_newest_login_tokens_of_a_user_stay_valid():
    store = accounts()
    application = store.issue("bob", 1000, None)
    texts = [store.issue("bob", 1000 + n, 600_000) for n in range(MAX_TOKENS_OF_A_USER + 5)]
    assert len(store.tokens_of("bob", 2000)) == MAX_TOKENS_OF_A_USER + 1
    assert [code_of(store.caller, text, 2100) for text in texts[:5]] == ["UnauthorizedUserError"] * 5
    assert all(store.caller(text, 2100) for text in (application, texts[5], texts[-1]))
    # At 1e9 s, all login tokens have expired, and `issue` removes them. The application token and the new token are left.
    store.issue("bob", 1e9, 60)
    assert len(json.loads(store.to_json())["tokens"]) == 2


def test_a_removed_user_loses_all_tokens_and_the_last_administrator_cannot_be_removed():
    store = accounts()
    text = store.issue("bob", 1000, None)
    store.remove_user("bob")
    assert code_of(store.caller, text, 1001) == "UnauthorizedUserError"
    assert code_of(store.user, "bob") == "NoUserError"
    assert code_of(store.remove_user, "ada") == "ForbiddenUserError"
    assert [user.name for user in store.users()] == ["ada"]
    assert code_of(store.add_user, ADA) == "ConflictUserError"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"users": [{}], "tokens": []}', '{"users": 1, "tokens": []}']
)
def test_invalid_stored_accounts_are_rejected(text):
    with pytest.raises(ValueError, match=r"."):
        Accounts.from_json(text)


class _Steps:
    issue = st.tuples(st.just("issue"), st.sampled_from(["ada", "bob"]), st.none() | st.integers(60, 600))
    revoke = st.tuples(st.just("revoke"), st.integers(0, 30))
    move = st.tuples(st.just("move"), st.integers(1, 400))
    restart = st.tuples(st.just("restart"))


@given(st.lists(st.one_of(_Steps.issue, _Steps.revoke, _Steps.move, _Steps.restart), max_size=30))
def test_a_token_authenticates_until_it_expires_or_is_revoked(steps):
    store, now_s, model = accounts(), 1000, {}
    for step in steps:
        match step:
            case ("issue", name, lifetime_s):
                model[store.issue(name, now_s, lifetime_s)] = (name, lifetime_s and now_s + lifetime_s)
            case ("revoke", number):
                alive = list(model)[number : number + 1]
                for text in alive:
                    name, ends_s = model.pop(text)
                    if ends_s is None or now_s < ends_s:
                        store.revoke(text, store.caller(text, now_s))
            case ("move", by_s):
                now_s += by_s
            case ("restart",):
                store = Accounts.from_json(store.to_json())
        for text, (name, ends_s) in model.items():
            if ends_s is None or now_s < ends_s:
                assert store.caller(text, now_s).name == name
            else:
                assert code_of(store.caller, text, now_s) == "UnauthorizedUserError"
