"""Session authentication of browsers: a single-use link, then a session.

The link has a login code in its fragment (`#`), which no server, proxy or access log receives. The page exchanges the code for
two secrets and sends both with every request: a cookie, which scripts cannot read, and a key, which the page stores. Browsers
send cookies to every port of a host (RFC 6265, 8.5), so on loopback also to servers of other users. A cookie without the key
is useless to them. Neither secret is the token of programs, and a session cannot create another link.

Sessions are signed with the experiment's secret, so they survive the manager's process. Only sessions that were ended early
are stored.
"""

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from nni_manager.engine.tokens import api_token_of, is_token, token_of
from nni_manager.errors import RetryableError
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.small_files import replace_file

log = logging.getLogger(__name__)

CODE_S = 600
"""Lifetime of a link."""
# Beyond this number the oldest code is evicted.
MAX_CODES = 20
SESSION_S = 7 * 24 * 3600
KEY_HEADER = "X-Trial-Keeper"
# Browsers send the cookies of all experiments of a host with each request, regardless of the port. 41 cookies take 6 KiB of
# the 16 KiB limit of a request's headers.
MAX_OTHER_COOKIES = 40
_COOKIE = "trial-keeper-"
# A reserved key in the file of ended sessions; no session has this name.
_VALID_FROM = ""


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """The two secrets of a session."""

    cookie: str
    key: str


class SessionAuth:
    """Login codes and sessions of one experiment."""

    def __init__(
        self, secret: bytes, experiment_id: str, ended: Path, now_s: Callable[[], float] = time.time
    ) -> None:
        """`secret`: the experiment's. `ended`: the file of ended sessions. `now_s`: seconds since the epoch."""
        self._secret = secret
        self.token = api_token_of(secret)
        """The token that authenticates programs."""
        self.cookie_name = f"{_COOKIE}{experiment_id}"
        self._ended_file = ended
        self._now_s = now_s
        self._codes: dict[bytes, float] = {}
        """The expiry of each code, by its hash, which prevents timing attacks."""
        self._ended: dict[str, float] = {}
        """The original expiry of each ended session, by name."""
        self._valid_from_s = 0.0
        """Sessions that started before this time are rejected."""
        try:
            self._ended = {str(name): float(end) for name, end in json.loads(ended.read_bytes()).items()}
            self._valid_from_s = self._ended.pop(_VALID_FROM, 0.0)
        except FileNotFoundError:
            pass  # no session was ended
        except (OSError, ValueError, TypeError, AttributeError) as error:
            # The file is corrupt, so any earlier session may be an ended one: reject all, also after a restart.
            self._valid_from_s = float(int(now_s()))
            log.warning("%s is corrupt (%r): all earlier sessions are ended", ended, error)
            with contextlib.suppress(OSError):  # the corrupt file has the same effect
                self._store()

    def new_login_code(self) -> str:
        """A single-use login code, valid for `CODE_S`."""
        code = secrets.token_urlsafe(32)
        while len(self._codes) >= MAX_CODES:
            del self._codes[next(iter(self._codes))]
        self._codes[_hashed(code)] = self._now_s() + CODE_S
        return code

    def begin(self, code: str) -> BrowserSession | None:
        """Exchange a login code for a session; None if the code is unknown, used or expired."""
        expires_at_s = self._codes.pop(_hashed(code), 0.0)
        if expires_at_s < self._now_s():
            return None
        name = f"{secrets.token_hex(16)}.{int(self._now_s()) + SESSION_S}"
        return BrowserSession(f"{name}.{self._signed('cookie', name)}", self._signed("key", name))

    def too_old(self, cookies: Mapping[str, str]) -> list[str]:
        """The oldest cookies of other experiments, beyond `MAX_OTHER_COOKIES`, which the browser should delete."""
        others = [name for name in cookies if name.startswith(_COOKIE) and name != self.cookie_name]
        others.sort(key=lambda name: _end_of(cookies[name].rpartition(".")[0]), reverse=True)
        return others[MAX_OTHER_COOKIES:]

    def is_authenticated(self, cookie: str | None, key: str) -> bool:
        """True if both secrets belong to the same valid session."""
        name, _, signature = (cookie or "").rpartition(".")
        # Compare both, regardless of the first result, for constant time.
        is_own = is_token(signature.encode(), self._signed("cookie", name))
        has_key = is_token(key.encode(), self._signed("key", name))
        if not (is_own and has_key) or name in self._ended:
            return False
        end_s = _end_of(name)
        return end_s > self._now_s() and end_s - SESSION_S >= self._valid_from_s

    def end(self, cookie: str) -> None:
        """End the session, also across restarts of the manager.

        Raises:
            RetryableError: the end could not be stored, so it would not survive a restart.
        """
        name = cookie.rpartition(".")[0]
        now_s = self._now_s()
        self._ended = {each: end for each, end in self._ended.items() if end > now_s} | {name: _end_of(name)}
        try:
            self._store()
        except OSError as error:
            raise RetryableError(
                f"cannot write {self._ended_file}: {error.strerror}; the session has ended, but a restarted manager would "
                "accept it again; free some space there, then sign out again"
            ) from error

    def _store(self) -> None:
        document = self._ended
        if self._valid_from_s + SESSION_S > self._now_s():
            document = document | {_VALID_FROM: self._valid_from_s}
        replace_file(self._ended_file, json.dumps(document).encode(), 0o600, is_durable=True)

    def _signed(self, what: str, name: str) -> str:
        # Job ids contain no spaces, so no keeper's token can equal one of these.
        return token_of(self._secret, f"the {what} of session {name}")


def _hashed(code: str) -> bytes:
    return sha256(code.encode("utf-8", "replace")).digest()


def _end_of(name: str) -> float:
    with contextlib.suppress(ValueError):
        return float(name.rpartition(".")[2])
    return 0.0
