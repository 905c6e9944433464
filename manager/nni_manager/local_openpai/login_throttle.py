"""Rate limit of password checks, against guessing and against the CPU cost of the deliberately slow hash.

Attempts of one source (a local user, or a remote address) are checked one at a time, with a cooldown after a failed one.
Sources do not delay each other. Delays do not depend on the user name, so they do not reveal which names exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request

from nni_manager.local_openpai.accounts import User, check_password
from nni_manager.local_openpai.errors import ApiError
from trial_keeper.wire.listener_uid import client_socket

# A guess takes 30 ms of CPU: 6 % of a core for each source that guesses continuously.
FAILURE_COOLDOWN_S = 0.5
# Further attempts of one source are rejected at once. The last queued attempt waits for 5 s.
MAX_WAITING = 10
# Bounds memory under guessing from many addresses; sources whose cooldown has passed are dropped.
_MAX_SOURCES = 1_000


class _Source:
    """The attempts of one source."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.waiting = 0
        self.blocked_until_s = 0.0


class LoginThrottle:
    """Checks passwords one at a time. Each source has one active check; its other checks wait, at most `MAX_WAITING`.

    `user_of` returns the user of a name. It is called after the wait, during which the password may have been changed.
    """

    def __init__(self, user_of: Callable[[str], User]) -> None:
        self._user_of = user_of
        self._sources: dict[str, _Source] = {}
        # One thread limits the cost to one core and 16 MiB.
        self._hashing = ThreadPoolExecutor(1, "passwords")

    async def check(self, name: str, password: str, source: str) -> None:
        """Check the user's password.

        Raises:
            ApiError: IncorrectPasswordError; or TooManyLoginsError, too many attempts of this source are waiting.
        """
        loop = asyncio.get_running_loop()
        if len(self._sources) >= _MAX_SOURCES:
            now_s = loop.time()
            self._sources = {
                name: each
                for name, each in self._sources.items()
                if each.waiting or each.blocked_until_s > now_s
            }
        attempts = self._sources.setdefault(source, _Source())
        if attempts.waiting >= MAX_WAITING:
            raise ApiError(
                "TooManyLoginsError",
                f"cannot check this password: {MAX_WAITING} of your attempts are already queued; try again in "
                f"{MAX_WAITING * FAILURE_COOLDOWN_S:.0f} s, or use a token",
            )
        attempts.waiting += 1
        try:
            async with attempts.turn:
                await asyncio.sleep(attempts.blocked_until_s - loop.time())
                try:
                    await loop.run_in_executor(self._hashing, check_password, self._user_of(name), password)
                except ApiError:
                    attempts.blocked_until_s = loop.time() + FAILURE_COOLDOWN_S
                    raise
        finally:
            attempts.waiting -= 1


def source_of(request: Request) -> str:
    """The source of a request: the local user that owns its connection, else the remote address."""
    client, server = request.scope["client"], request.scope["server"]
    if client is None or server is None:
        return ""
    found = client_socket(client, server)
    return str(client[0]) if found is None else f"uid {found.uid}"
