"""Login links and web sessions: which secrets authenticate, and for how long."""

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
def new_session_auth(tmp_path, clock):
    def make(secret=b"secret", ended=tmp_path / "ended.json"):
        return SessionAuth(secret, "TESTEXPT", ended, clock)

    return make


def test_a_login_link_starts_a_session_only_once(new_session_auth):
    session_auth = new_session_auth()
    code = session_auth.new_login_code()
    session = session_auth.begin(code)
    assert session_auth.is_authenticated(session.cookie, session.key)
    assert session_auth.begin(code) is None


def test_a_login_link_expires_after_ten_minutes(new_session_auth, clock):
    session_auth = new_session_auth()
    early, late = session_auth.new_login_code(), session_auth.new_login_code()
    clock.now_s += CODE_S
    assert session_auth.begin(early) is not None
    clock.now_s += 1
    assert session_auth.begin(late) is None


@pytest.mark.parametrize("code", ["", "x", "\ud800", "x" * 100_000])
def test_an_unknown_login_code_is_refused(new_session_auth, code):
    session_auth = new_session_auth()
    session_auth.new_login_code()
    assert session_auth.begin(code) is None


def test_only_the_most_recent_login_links_are_valid(new_session_auth):
    session_auth = new_session_auth()
    codes = [session_auth.new_login_code() for _ in range(MAX_CODES + 1)]
    assert len(set(codes)) == len(codes)
    assert session_auth.begin(codes[0]) is None
    assert all(session_auth.begin(code) for code in codes[1:])


def test_a_session_requires_its_cookie_and_its_key(new_session_auth):
    session_auth = new_session_auth()
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


def test_a_session_stays_valid_after_a_manager_restart_and_expires_after_a_week(new_session_auth, clock):
    before = new_session_auth()
    session = before.begin(before.new_login_code())
    session_auth = new_session_auth()
    clock.now_s += SESSION_S - 1
    assert session_auth.is_authenticated(session.cookie, session.key)
    clock.now_s += 1
    assert not session_auth.is_authenticated(session.cookie, session.key)


def test_a_session_cookie_with_a_changed_expiry_is_not_accepted(new_session_auth, clock):
    session_auth = new_session_auth()
    session = session_auth.begin(session_auth.new_login_code())
    name, _, signature = session.cookie.rpartition(".")
    longer = name.rpartition(".")[0] + f".{int(clock.now_s) + 10 * SESSION_S}.{signature}"
    assert not session_auth.is_authenticated(longer, session.key)


def test_a_session_is_valid_only_for_its_experiment(new_session_auth):
    here, elsewhere = new_session_auth(), new_session_auth(b"another secret")
    session = here.begin(here.new_login_code())
    assert not elsewhere.is_authenticated(session.cookie, session.key)


def test_keeper_tokens_and_the_api_token_are_not_accepted_as_session_secrets(new_session_auth, clock):
    """Keeper tokens, the API token and session cookies are signed with the same secret."""
    session_auth = new_session_auth()
    name = f"{'0' * 32}.{int(clock.now_s) + SESSION_S}"
    for job_id in ("env-0", name, f"cookie-{name}", ""):
        token = token_of(b"secret", job_id)
        assert not session_auth.is_authenticated(f"{name}.{token}", token)
    assert session_auth.token == api_token_of(b"secret")


def test_an_ended_session_stays_ended_after_a_restart(new_session_auth, tmp_path, clock):
    session_auth = new_session_auth()
    one, other = (session_auth.begin(session_auth.new_login_code()) for _ in range(2))
    session_auth.end(one.cookie)
    for each in (session_auth, new_session_auth()):
        assert not each.is_authenticated(one.cookie, one.key)
        assert each.is_authenticated(other.cookie, other.key)
    stored = tmp_path / "ended.json"
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert one.cookie.rpartition(".")[2] not in stored.read_text()
    # end() removes expired sessions from the file, so only the third session is left.
    clock.now_s += SESSION_S + 1
    third = session_auth.begin(session_auth.new_login_code())
    session_auth.end(third.cookie)
    assert list(json.loads(stored.read_text())) == [third.cookie.rpartition(".")[0]]


def test_a_sign_out_ends_the_session_even_if_the_sign_out_cannot_be_stored(new_session_auth, tmp_path):
    session_auth = new_session_auth(ended=tmp_path / "no such folder" / "ended.json")
    session = session_auth.begin(session_auth.new_login_code())
    with pytest.raises(RetryableError, match=r"^cannot write .*; the session has ended"):
        session_auth.end(session.cookie)
    assert not session_auth.is_authenticated(session.cookie, session.key)


@pytest.mark.parametrize("content", ["", "[", "[1]", '{"x": "y"}', "null"])
def test_an_unreadable_list_of_ended_sessions_ends_all_earlier_sessions(
    new_session_auth, tmp_path, clock, content
):
    before = new_session_auth()
    session = before.begin(before.new_login_code())
    clock.now_s += 1
    (tmp_path / "ended.json").write_text(content)
    session_auth = new_session_auth()
    assert not session_auth.is_authenticated(session.cookie, session.key)
    later = session_auth.begin(session_auth.new_login_code())
    assert session_auth.is_authenticated(later.cookie, later.key)
    session_auth.end(session_auth.begin(session_auth.new_login_code()).cookie)
    # The first restart replaced the damaged list of ended sessions. Two more restarts read the list that replaced it.
    for each in (new_session_auth(), new_session_auth()):
        assert not each.is_authenticated(session.cookie, session.key)
        assert each.is_authenticated(later.cookie, later.key)
