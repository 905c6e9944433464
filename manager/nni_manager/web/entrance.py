"""How a browser is let in: by a link that works once, and from then on by a session.

The link holds a code behind its `#`, which no server, proxy or log of addresses sees. The page trades it for two secrets, and
needs both with everything it asks: a cookie, which no script can read, and a key, which the page keeps. Browsers send cookies to
every port of a host (RFC 6265, 8.5), so on loopback to servers of other users: without the key a cookie is of no use to them.
Neither is the token, with which programs are let in, and neither lets anybody make another link.

Sessions are signed with the experiment's secret, so they outlive the manager's process and nothing is stored of them, but of
those that were ended before their time.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from nni_manager.engine.tokens import api_token_of, is_token, token_of
from nni_manager.errors import TryAgain
from trial_keeper.wire.workspace import replace_file

CODE_S = 600
"""How long a link works."""
# Links that were made last; who asks for more of them has forgotten the others.
MOST_CODES = 20
SESSION_S = 7 * 24 * 3600
KEY_HEADER = "X-Trial-Keeper"
# Browsers send the cookies of all experiments of a host with each request, whatever the port; 41 of them are 6 KiB of the
# 16 KiB that a request may have for all of its headers.
MOST_OTHER_COOKIES = 40
_COOKIE = "trial-keeper-"


class SignOutNotStored(TryAgain):
    """cannot end the session for good; free some space on the disk of the experiment's folder, then try again"""


@dataclass(frozen=True, slots=True)
class Session:
    """The two secrets of a page."""

    cookie: str
    key: str


class Entrance:
    """Who is let in to one experiment."""

    def __init__(
        self, secret: bytes, experiment_id: str, ended: Path, now_s: Callable[[], float] = time.time
    ) -> None:
        """`secret`: the experiment's. `ended`: the file of sessions that were ended. `now_s`: seconds since the epoch."""
        self._secret = secret
        self.token = api_token_of(secret)
        """What lets a program in."""
        self.cookie_name = f"{_COOKIE}{experiment_id}"
        self._ended_file = ended
        self._now_s = now_s
        self._codes: dict[bytes, float] = {}
        """Until when each works, by its hash: nothing here gives a code away by how long it takes."""
        self._ended: dict[str, float] = {}
        """When each ended session would have ended by itself."""
        self._none_from_before_s = 0.0
        """Sessions that began before this are not let in."""
        try:
            self._ended = {str(name): float(end) for name, end in json.loads(ended.read_bytes()).items()}
        except FileNotFoundError:
            pass  # none was
        except (OSError, ValueError, TypeError, AttributeError):
            # Somebody has spoilt it. Any session of before may be one that was ended.
            self._none_from_before_s = float(int(now_s()))

    def new_code(self) -> str:
        """What lets one page in, once, within `CODE_S`."""
        code = secrets.token_urlsafe(32)
        while len(self._codes) >= MOST_CODES:
            del self._codes[next(iter(self._codes))]
        self._codes[_hashed(code)] = self._now_s() + CODE_S
        return code

    def begin(self, code: str) -> Session | None:
        """A session for who has the code; None: it is none, was used, or is too old."""
        works_until_s = self._codes.pop(_hashed(code), 0.0)
        if works_until_s < self._now_s():
            return None
        name = f"{secrets.token_hex(16)}.{int(self._now_s()) + SESSION_S}"
        return Session(f"{name}.{self._signed('cookie', name)}", self._signed("key", name))

    def too_old(self, cookies: Mapping[str, str]) -> list[str]:
        """The names of those sessions of other experiments that a browser should forget, since it has newer ones of enough."""
        others = [name for name in cookies if name.startswith(_COOKIE) and name != self.cookie_name]
        others.sort(key=lambda name: _end_of(cookies[name].rpartition(".")[0]), reverse=True)
        return others[MOST_OTHER_COOKIES:]

    def lets_in(self, cookie: str | None, key: str) -> bool:
        """Whether these are of one session that has not ended."""
        name, _, signature = (cookie or "").rpartition(".")
        # Both are compared, whatever comes of the first.
        is_own = is_token(signature.encode(), self._signed("cookie", name))
        has_key = is_token(key.encode(), self._signed("key", name))
        if not (is_own and has_key) or name in self._ended:
            return False
        end_s = _end_of(name)
        return end_s > self._now_s() and end_s - SESSION_S >= self._none_from_before_s

    def end(self, cookie: str) -> None:
        """From now on the session lets nobody in, after a restart of the manager neither.

        Raises:
            SignOutNotStored: a restart would forget it.
        """
        name = cookie.rpartition(".")[0]
        now_s = self._now_s()
        self._ended = {each: end for each, end in self._ended.items() if end > now_s} | {name: _end_of(name)}
        try:
            replace_file(self._ended_file, json.dumps(self._ended).encode(), 0o600)
        except OSError as error:
            raise SignOutNotStored(
                f"cannot write {self._ended_file}: {error.strerror}; the session has ended, and a manager that is started anew "
                "would take it again: free some space there, then try again"
            ) from error

    def _signed(self, what: str, name: str) -> str:
        # No id of a job has a space, so no keeper's token is one of these.
        return token_of(self._secret, f"the {what} of session {name}")


def _hashed(code: str) -> bytes:
    return sha256(code.encode("utf-8", "replace")).digest()


def _end_of(name: str) -> float:
    with contextlib.suppress(ValueError):
        return float(name.rpartition(".")[2])
    return 0.0
