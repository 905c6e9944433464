"""The rate limit of password checks of the local OpenPAI."""

import asyncio

import pytest

from nni_manager.local_openpai import login_throttle
from nni_manager.local_openpai.accounts import new_user
from nni_manager.local_openpai.errors import ApiError
from nni_manager.local_openpai.login_throttle import LoginThrottle

USER = new_user("ada", "the password", is_admin=False)


async def guess(throttle, source):
    with pytest.raises(ApiError) as caught:
        await throttle.check(USER.name, "a guess", source)
    assert caught.value.code == "IncorrectPasswordError"


@pytest.mark.slow
def test_login_sources_without_a_cooldown_are_removed_when_there_are_too_many_sources(monkeypatch):
    monkeypatch.setattr(login_throttle, "_MAX_SOURCES", 3)

    async def scenario():
        throttle = LoginThrottle(lambda name: USER)
        for number in range(9):
            await throttle.check(USER.name, "the password", f"10.0.0.{number}")
            assert len(throttle._sources) <= 3

    asyncio.run(scenario())


def test_login_sources_with_a_failed_or_pending_login_are_never_removed(monkeypatch):
    monkeypatch.setattr(login_throttle, "_MAX_SOURCES", 1)
    monkeypatch.setattr(login_throttle, "FAILURE_COOLDOWN_S", 3600.0)

    async def scenario():
        throttle = LoginThrottle(lambda name: USER)
        await guess(throttle, "guesser")
        waiting = asyncio.ensure_future(throttle.check(USER.name, "the password", "guesser"))
        await throttle.check(USER.name, "the password", "10.0.0.1")
        await throttle.check(USER.name, "the password", "10.0.0.2")
        assert throttle._sources.keys() == {"guesser", "10.0.0.2"}
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await throttle.check(USER.name, "the password", "10.0.0.3")
        assert throttle._sources.keys() == {"guesser", "10.0.0.3"}

    asyncio.run(scenario())


def test_a_waiting_login_is_checked_against_the_password_that_is_valid_at_the_time_of_the_check(monkeypatch):
    monkeypatch.setattr(login_throttle, "FAILURE_COOLDOWN_S", 0.01)
    users = {"ada": USER}

    async def scenario():
        throttle = LoginThrottle(users.__getitem__)
        guessing = asyncio.ensure_future(guess(throttle, "10.0.0.1"))
        waiting = [
            asyncio.ensure_future(throttle.check("ada", password, "10.0.0.1"))
            for password in ("the password", "another password")
        ]
        # All three logins enter the throttle before the password changes.
        await asyncio.sleep(0)
        users["ada"] = new_user("ada", "another password", is_admin=False)
        await guessing
        refused, accepted = await asyncio.gather(*waiting, return_exceptions=True)
        assert (refused.code, accepted) == ("IncorrectPasswordError", None)

    asyncio.run(scenario())
