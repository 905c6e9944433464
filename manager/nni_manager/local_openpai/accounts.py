"""Who may ask: users with passwords, and the tokens they hold instead. Pure but for randomness; the caller has the clock.

A token looks like OpenPAI's (a JSON web token whose payload a client may read), and is looked up by its hash: what is stored
gives no one a token. Its key is thrown away when it has been signed.

Source: microsoft/pai v1.8.1, REST server, models/v2/token and user; RFC 7519.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from nni_manager.local_openpai.refusals import Refused, bad_token

USER_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
SHORTEST_PASSWORD = 6
SHORTEST_EXPIRATION_S, LONGEST_EXPIRATION_S = 60, 604_800
# Programs log in again and again and never out. The oldest of so many has been forgotten by whoever had it.
MOST_TOKENS_OF_A_USER = 1_000

# 16 MiB and some 30 ms for every guess. Source: RFC 7914; OWASP's smallest figures for interactive logins.
_SCRYPT = {"n": 2**14, "r": 8, "p": 1, "dklen": 32}


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who may log in. `password` is salt and scrypt hash, in hexadecimal."""

    name: str
    password: str
    is_admin: bool


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token. `digest` is the SHA-256 of its text; `text` is without the signature, and so no secret.

    An application's token has no end (`expires_at_s` None) and may not change users.
    """

    digest: str
    text: str
    user: str
    is_application: bool
    issued_at_s: int
    expires_at_s: int | None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and by which token."""

    user: User
    token: Token

    @property
    def name(self) -> str:
        """The user's name."""
        return self.user.name

    def may_change(self, owner: str) -> bool:
        """Whether what belongs to `owner` may be changed; everybody may look at everything."""
        return self.user.is_admin or self.name == owner


class Accounts:
    """All users and tokens. Every change is to be stored (`to_json`) before it is told to anyone."""

    def __init__(self, users: Iterable[User] = (), tokens: Iterable[Token] = ()) -> None:
        self._users = {user.name: user for user in users}
        self._tokens = {token.digest: token for token in tokens}

    @classmethod
    def from_json(cls, text: str) -> Accounts:
        """What `to_json` wrote.

        Raises:
            ValueError: it did not.
        """
        try:
            document = json.loads(text)
            return cls(
                [User(**each) for each in document["users"]], [Token(**each) for each in document["tokens"]]
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"no list of users and tokens: {error}") from error

    def to_json(self) -> str:
        """All of it, as text; no password and no token can be told from it."""
        users, tokens = self._users.values(), self._tokens.values()
        return json.dumps(
            {"users": [asdict(each) for each in users], "tokens": [asdict(each) for each in tokens]}
        )

    # ---- users

    def user(self, name: str) -> User:
        """The user of that name.

        Raises:
            Refused: NoUserError.
        """
        if name not in self._users:
            raise Refused("NoUserError", f"User {name} is not found.")
        return self._users[name]

    def users(self) -> list[User]:
        """All, in the order in which they came."""
        return list(self._users.values())

    def add_user(self, user: User) -> None:
        """Take in a user whom `new_user` made.

        Raises:
            Refused: ConflictUserError, there is one of that name.
        """
        if user.name in self._users:
            raise Refused("ConflictUserError", f"User name {user.name} already exists.")
        self.put_user(user)

    def put_user(self, user: User) -> None:
        """Take in a user, or give one that is there another password; tokens stay."""
        self._users[user.name] = user

    def remove_user(self, name: str) -> None:
        """Forget a user and every token of theirs.

        Raises:
            Refused: NoUserError; or ForbiddenUserError, it is the only administrator.
        """
        user = self.user(name)
        if user.is_admin and sum(each.is_admin for each in self._users.values()) == 1:
            raise Refused("ForbiddenUserError", f"User {name} is the only administrator; name another first.")
        del self._users[name]
        self._tokens = {digest: token for digest, token in self._tokens.items() if token.user != name}

    # ---- tokens

    def issue(self, name: str, now_s: float, lifetime_s: int | None) -> str:
        """A new token of this user. `lifetime_s` None: an application's, without end."""
        issued_at_s = int(now_s)
        expires_at_s = None if lifetime_s is None else issued_at_s + lifetime_s
        payload = {
            "username": name,
            "application": lifetime_s is None,
            "iat": issued_at_s,
            **({} if expires_at_s is None else {"exp": expires_at_s}),
            "jti": secrets.token_hex(8),
        }
        unsigned = f"{_encoded({'alg': 'HS256', 'typ': 'JWT'})}.{_encoded(payload)}"
        signature = hmac.digest(secrets.token_bytes(32), unsigned.encode(), "sha256")
        text = f"{unsigned}.{_base64(signature)}"
        token = Token(_digest(text), f"{unsigned}.", name, lifetime_s is None, issued_at_s, expires_at_s)
        self._tokens[token.digest] = token
        self._prune(name, now_s)
        return text

    def caller(self, token_text: str, now_s: float) -> Caller:
        """Whose token this is.

        Raises:
            Refused: UnauthorizedUserError, it is nobody's, or has come to its end.
        """
        token = self._tokens.get(_digest(token_text))
        if token is None or not _is_alive(token, now_s):
            raise bad_token()
        return Caller(self._users[token.user], token)

    def tokens_of(self, name: str, now_s: float) -> list[Token]:
        """The tokens that this user can use now, the oldest first."""
        return [token for token in self._tokens.values() if token.user == name and _is_alive(token, now_s)]

    def revoke(self, token_text: str, caller: Caller) -> None:
        """End a token, given whole or without its signature.

        Raises:
            Refused: NoTokenError, or ForbiddenUserError where it is another user's.
        """
        digest = _digest(token_text)
        found = next(
            (each for each in self._tokens.values() if token_text == each.text or digest == each.digest), None
        )
        if found is None:
            raise Refused("NoTokenError", "Token is not found.")
        if not caller.may_change(found.user):
            raise Refused("ForbiddenUserError", f"User {caller.name} is not allowed to do this operation.")
        del self._tokens[found.digest]

    def _prune(self, name: str, now_s: float) -> None:
        self._tokens = {digest: token for digest, token in self._tokens.items() if _is_alive(token, now_s)}
        logins = [token for token in self._tokens.values() if token.user == name and not token.is_application]
        for token in logins[:-MOST_TOKENS_OF_A_USER]:
            del self._tokens[token.digest]


def new_user(name: str, password: str, *, is_admin: bool) -> User:
    """A user who can log in with this password. Takes some 30 ms on purpose.

    Raises:
        Refused: InvalidParametersError, no user can have such a name or password.
    """
    if not USER_NAME.fullmatch(name):
        raise Refused(
            "InvalidParametersError",
            f"cannot use the user name {name[:64]!r}: write 1 to 64 letters, digits, _ . or -",
        )
    if len(password) < SHORTEST_PASSWORD:
        raise Refused(
            "InvalidParametersError",
            f"cannot use a password of {len(password)} characters; write at least {SHORTEST_PASSWORD}",
        )
    salt = secrets.token_bytes(16)
    return User(name, f"{salt.hex()}:{_scrypt(password, salt).hex()}", is_admin)


def check_password(user: User, password: str) -> None:
    """See that this is the user's password. Takes some 30 ms on purpose.

    Raises:
        Refused: IncorrectPasswordError.
    """
    salt, _, expected = user.password.partition(":")
    if not hmac.compare_digest(_scrypt(password, bytes.fromhex(salt)), bytes.fromhex(expected)):
        raise Refused("IncorrectPasswordError", "Password is incorrect.")


def payload_of(caller: Caller) -> dict[str, Any]:
    """What a token says, as its check answers it."""
    token = caller.token
    end = {} if token.expires_at_s is None else {"exp": token.expires_at_s}
    return {
        "username": token.user,
        "application": token.is_application,
        "admin": caller.user.is_admin,
        "iat": token.issued_at_s,
        **end,
    }


def _is_alive(token: Token, now_s: float) -> bool:
    return token.expires_at_s is None or now_s < token.expires_at_s


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(errors="surrogatepass"), salt=salt, **_SCRYPT)


def _digest(token_text: str) -> str:
    # A token has 256 random bits: nobody guesses what was hashed, however fast the hash is.
    return hashlib.sha256(token_text.encode(errors="surrogatepass")).hexdigest()


def _encoded(values: dict[str, Any]) -> str:
    return _base64(json.dumps(values, separators=(",", ":")).encode())


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
