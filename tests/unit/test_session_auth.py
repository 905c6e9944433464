"""Who a link lets in, and for how long."""

import json
import stat

import pytest

from nni_manager.engine.tokens import api_token_of, token_of
from nni_manager.errors import RetryableError
from nni_manager.web.session_auth import CODE_S, MAX_CODES, SESSION_S, SessionAuth


class Clock:
    now_s = 1_800_000_000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def an_entrance(tmp_path, clock):
    def make(secret=b"secret", ended=tmp_path / "ended.json"):
        return SessionAuth(secret, "TESTEXPT", ended, clock)

    return make


def test_a_link_lets_in_once(an_entrance):
    session_auth = an_entrance()
    code = session_auth.new_login_code()
    session = session_auth.begin(code)
    assert session_auth.is_authenticated(session.cookie, session.key)
    assert session_auth.begin(code) is None


def test_a_link_is_too_old_after_ten_minutes(an_entrance, clock):
    session_auth = an_entrance()
    early, late = session_auth.new_login_code(), session_auth.new_login_code()
    clock.now_s += CODE_S
    assert session_auth.begin(early) is not None
    clock.now_s += 1
    assert session_auth.begin(late) is None


@pytest.mark.parametrize("code", ["", "x", "\ud800", "x" * 100_000])
def test_nothing_else_lets_in(an_entrance, code):
    session_auth = an_entrance()
    session_auth.new_login_code()
    assert session_auth.begin(code) is None


def test_of_many_links_the_last_ones_work(an_entrance):
    session_auth = an_entrance()
    codes = [session_auth.new_login_code() for _ in range(MAX_CODES + 1)]
    assert len(set(codes)) == len(codes)
    assert session_auth.begin(codes[0]) is None
    assert all(session_auth.begin(code) for code in codes[1:])


def test_a_session_needs_both_of_its_secrets(an_entrance):
    session_auth = an_entrance()
    one, other = (session_auth.begin(session_auth.new_login_code()) for _ in range(2))
    name = one.cookie.rpartition(".")[0]
    for cookie, key in [
        (one.cookie, ""),
        (None, one.key),
        ("", one.key),
        (one.cookie, other.key),
        (other.cookie, one.key),
        (f"{name}.{one.key}", one.key),
        (f"{name}.", one.key),
        (one.cookie + "x", one.key),
        (one.cookie, one.key + "ü"),
        (session_auth.token, session_auth.token),
    ]:
        assert not session_auth.is_authenticated(cookie, key)
    assert session_auth.is_authenticated(one.cookie, one.key)


def test_a_session_outlives_the_manager_and_ends_after_a_week(an_entrance, clock):
    before = an_entrance()
    session = before.begin(before.new_login_code())
    session_auth = an_entrance()
    clock.now_s += SESSION_S - 1
    assert session_auth.is_authenticated(session.cookie, session.key)
    clock.now_s += 1
    assert not session_auth.is_authenticated(session.cookie, session.key)


def test_nobody_can_make_a_session_last_longer(an_entrance, clock):
    session_auth = an_entrance()
    session = session_auth.begin(session_auth.new_login_code())
    name, _, signature = session.cookie.rpartition(".")
    longer = name.rpartition(".")[0] + f".{int(clock.now_s) + 10 * SESSION_S}.{signature}"
    assert not session_auth.is_authenticated(longer, session.key)


def test_a_session_is_of_one_experiment(an_entrance):
    here, elsewhere = an_entrance(), an_entrance(b"another secret")
    session = here.begin(here.new_login_code())
    assert not elsewhere.is_authenticated(session.cookie, session.key)


def test_no_keepers_token_and_not_the_api_token_makes_a_session(an_entrance, clock):
    """All are signed with the same secret."""
    session_auth = an_entrance()
    name = f"{'0' * 32}.{int(clock.now_s) + SESSION_S}"
    for job_id in ("env-0", name, f"cookie-{name}", ""):
        token = token_of(b"secret", job_id)
        assert not session_auth.is_authenticated(f"{name}.{token}", token)
    assert session_auth.token == api_token_of(b"secret")


def test_a_session_that_was_ended_stays_ended_after_a_restart(an_entrance, tmp_path, clock):
    session_auth = an_entrance()
    one, other = (session_auth.begin(session_auth.new_login_code()) for _ in range(2))
    session_auth.end(one.cookie)
    for each in (session_auth, an_entrance()):
        assert not each.is_authenticated(one.cookie, one.key)
        assert each.is_authenticated(other.cookie, other.key)
    stored = tmp_path / "ended.json"
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert one.cookie.rpartition(".")[2] not in stored.read_text()
    # What has ended by itself is not kept.
    clock.now_s += SESSION_S + 1
    third = session_auth.begin(session_auth.new_login_code())
    session_auth.end(third.cookie)
    assert list(json.loads(stored.read_text())) == [third.cookie.rpartition(".")[0]]


def test_who_cannot_be_signed_out_for_good_is_told_and_signed_out(an_entrance, tmp_path):
    session_auth = an_entrance(ended=tmp_path / "no such folder" / "ended.json")
    session = session_auth.begin(session_auth.new_login_code())
    with pytest.raises(RetryableError, match=r"^cannot write .*; the session has ended"):
        session_auth.end(session.cookie)
    assert not session_auth.is_authenticated(session.cookie, session.key)


@pytest.mark.parametrize("content", ["", "[", "[1]", '{"x": "y"}', "null"])
def test_when_nobody_can_tell_which_sessions_were_ended_all_of_before_are(
    an_entrance, tmp_path, clock, content
):
    before = an_entrance()
    session = before.begin(before.new_login_code())
    clock.now_s += 1
    (tmp_path / "ended.json").write_text(content)
    session_auth = an_entrance()
    assert not session_auth.is_authenticated(session.cookie, session.key)
    anew = session_auth.begin(session_auth.new_login_code())
    assert session_auth.is_authenticated(anew.cookie, anew.key)
    session_auth.end(session_auth.begin(session_auth.new_login_code()).cookie)
    for each in (an_entrance(), an_entrance()):  # a restart, and one more
        assert not each.is_authenticated(session.cookie, session.key)
        assert each.is_authenticated(anew.cookie, anew.key)
