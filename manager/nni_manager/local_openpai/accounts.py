"""Accounts: users with passwords, and their tokens. Pure except for randomness; the caller supplies the time.

A token has OpenPAI's form, a JSON web token with a readable payload. Only the hash of the token is stored, so the stored data
reveals no token. The signing key is discarded after signing.

Source: microsoft/pai v1.8.1, REST server, models/v2/token and user; RFC 7519.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from nni_manager.local_openpai.errors import ApiError, bad_token, invalid_parameters
from trial_keeper.frozen_dataclass import dataclass

USER_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
MIN_PASSWORD = 6
# Programs log in often and never log out. Beyond this number, the oldest token is evicted.
MAX_TOKENS_OF_A_USER = 1_000

# 16 MiB and about 30 ms per guess. Source: RFC 7914; OWASP's minimum for interactive logins.
# The owner of the state directory has no password before the first `--set-password`; no answer shows who is the owner.
_INCORRECT = (
    "User name or password is incorrect. The owner of this service sets a password with "
    "`nnictl openpai user --set-password`."
)
_SCRYPT = {"n": 2**14, "r": 8, "p": 1, "dklen": 32}
# A random value of the length of a user's hash; no password matches this value.
_NOBODYS_PASSWORD = f"{secrets.token_hex(16)}:{secrets.token_hex(32)}"


@dataclass(frozen=True, slots=True)
class User:
    """A user who can log in. `password` is salt and scrypt hash, in hexadecimal."""

    name: str
    password: str
    is_admin: bool


@dataclass(frozen=True, slots=True)
class Token:
    """The stored part of a token. `digest` is the SHA-256 of its text; `text` omits the signature and is not secret.

    An application token does not expire (`expires_at_s` None) and cannot change users. The owner's token in the state directory
    (`is_owners`) can: a process that reads that directory has full access anyway.
    """

    digest: str
    text: str
    user: str
    is_application: bool
    issued_at_s: int
    expires_at_s: int | None
    is_owners: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """The user and the token of a request."""

    user: User
    token: Token

    @property
    def name(self) -> str:
        """The user's name."""
        return self.user.name

    def may_change(self, owner: str) -> bool:
        """True if the caller may change what belongs to `owner`. Every caller may read everything."""
        return self.user.is_admin or self.name == owner

    def must_be_admin(self) -> None:
        """Refuse all but administrators, and those who log in with an application's token.

        Raises:
            ApiError: ForbiddenUserError.
        """
        if self.token.is_application and not self.token.is_owners:
            raise ApiError("ForbiddenUserError", "Applications are not allowed to do this operation.")
        if not self.user.is_admin:
            raise ApiError("ForbiddenUserError", "Non-admin is not allowed to do this operation.")


class Accounts:
    """All users and tokens. Store every change (`to_json`) before reporting it to a client; see `change`."""

    def __init__(self, users: Iterable[User] = (), tokens: Iterable[Token] = ()) -> None:
        self._users = {user.name: user for user in users}
        self._tokens = {token.digest: token for token in tokens}

    @classmethod
    def from_json(cls, text: str) -> Accounts:
        """The accounts that `to_json` wrote.

        Raises:
            ValueError: the text is not such a document.
        """
        try:
            document = json.loads(text)
            return cls(
                [User(**each) for each in document["users"]], [Token(**each) for each in document["tokens"]]
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"users or tokens are missing or invalid: {error}") from error

    def to_json(self) -> str:
        """All accounts as text, from which no password and no token can be derived."""
        users, tokens = self._users.values(), self._tokens.values()
        return json.dumps(
            {"users": [asdict(each) for each in users], "tokens": [asdict(each) for each in tokens]}
        )

    @contextlib.contextmanager
    def change(self) -> Iterator[Accounts]:
        """A change of the accounts, which an exception within the block undoes."""
        users, tokens = self._users.copy(), self._tokens.copy()
        try:
            yield self
        except BaseException:
            self._users, self._tokens = users, tokens
            raise

    # ---- users

    def user(self, name: str) -> User:
        """The user of that name.

        Raises:
            ApiError: NoUserError.
        """
        if name not in self._users:
            raise ApiError("NoUserError", f"User {name} is not found.")
        return self._users[name]

    def users(self) -> list[User]:
        """All users, in the order of creation."""
        return list(self._users.values())

    def add_user(self, user: User) -> None:
        """Add a user that `new_user` created.

        Raises:
            ApiError: ConflictUserError, the name is taken.
        """
        if user.name in self._users:
            raise ApiError("ConflictUserError", f"User name {user.name} already exists.")
        self._users[user.name] = user

    def replace_user(self, user: User) -> None:
        """Store another password of an existing user. Tokens stay valid.

        Raises:
            ApiError: NoUserError.
        """
        self._users[self.user(user.name).name] = user

    def remove_user(self, name: str) -> None:
        """Remove a user and all of their tokens.

        Raises:
            ApiError: NoUserError; or ForbiddenUserError, the user is the only administrator.
        """
        self._keep_an_admin(self.user(name), "remove")
        del self._users[name]
        self._tokens = {digest: token for digest, token in self._tokens.items() if token.user != name}

    def set_admin(self, name: str, is_admin: bool) -> User:
        """Make a user an administrator, or no longer one; returns the changed user.

        Raises:
            ApiError: NoUserError; or ForbiddenUserError, the user is the only administrator.
        """
        user = self.user(name)
        if not is_admin:
            self._keep_an_admin(user, "take the rights of")
        self._users[name] = replace(user, is_admin=is_admin)
        return self._users[name]

    def _keep_an_admin(self, user: User, what: str) -> None:
        if user.is_admin and sum(each.is_admin for each in self._users.values()) == 1:
            message = (
                f"cannot {what} user {user.name}, the only administrator; add another administrator first"
            )
            raise ApiError("ForbiddenUserError", message)

    # ---- tokens

    def login(self, name: str) -> User:
        """The user for a password check. An unknown name gives a user that no password matches, with equal cost."""
        return self._users.get(name) or User(name, _NOBODYS_PASSWORD, is_admin=False)

    def make_owners(self, token_text: str) -> None:
        """Mark an existing token as the one in the daemon's state directory."""
        digest = _digest(token_text)
        self._tokens[digest] = replace(self._tokens[digest], is_owners=True)

    def issue(self, name: str, now_s: float, lifetime_s: int | None) -> str:
        """Create a token of this user. `lifetime_s` None: an application token, which does not expire."""
        issued_at_s = int(now_s)
        expires_at_s = None if lifetime_s is None else issued_at_s + lifetime_s
        payload = {**_claims(name, issued_at_s, expires_at_s), "jti": secrets.token_hex(8)}
        unsigned = f"{_encoded({'alg': 'HS256', 'typ': 'JWT'})}.{_encoded(payload)}"
        signature = hmac.digest(secrets.token_bytes(32), unsigned.encode(), "sha256")
        text = f"{unsigned}.{_base64(signature)}"
        token = Token(_digest(text), f"{unsigned}.", name, lifetime_s is None, issued_at_s, expires_at_s)
        self._tokens[token.digest] = token
        self._prune(name, now_s)
        return text

    def caller(self, token_text: str, now_s: float) -> Caller:
        """The caller that this token identifies.

        Raises:
            ApiError: UnauthorizedUserError, the token is unknown or has expired.
        """
        token = self._tokens.get(_digest(token_text))
        if token is None or not _is_alive(token, now_s):
            raise bad_token()
        return Caller(self._users[token.user], token)

    def tokens_of(self, name: str, now_s: float) -> list[Token]:
        """The valid tokens of this user, the oldest first."""
        return [token for token in self._tokens.values() if token.user == name and _is_alive(token, now_s)]

    def revoke(self, token_text: str, caller: Caller) -> None:
        """Revoke a token, given with or without its signature.

        Raises:
            ApiError: NoTokenError; or ForbiddenUserError, the token is another user's.
        """
        digest = _digest(token_text)
        found = next(
            (each for each in self._tokens.values() if token_text == each.text or digest == each.digest), None
        )
        if found is None:
            raise ApiError("NoTokenError", "Token is not found.")
        if not caller.may_change(found.user):
            raise ApiError("ForbiddenUserError", f"User {caller.name} is not allowed to do this operation.")
        del self._tokens[found.digest]

    def _prune(self, name: str, now_s: float) -> None:
        self._tokens = {digest: token for digest, token in self._tokens.items() if _is_alive(token, now_s)}
        logins = [token for token in self._tokens.values() if token.user == name and not token.is_application]
        for token in logins[:-MAX_TOKENS_OF_A_USER]:
            del self._tokens[token.digest]


def new_user(name: str, password: str, *, is_admin: bool) -> User:
    """A user who can log in with this password. Takes about 30 ms by design.

    Raises:
        ApiError: InvalidParametersError, the name or the password is invalid.
    """
    if not USER_NAME.fullmatch(name):
        raise invalid_parameters(
            f"cannot use the user name {name[:64]!r}: use 1 to 64 letters, digits, _ . or -"
        )
    if len(password) < MIN_PASSWORD:
        raise invalid_parameters(
            f"cannot use a password of {len(password)} characters; use at least {MIN_PASSWORD}"
        )
    salt = secrets.token_bytes(16)
    return User(name, f"{salt.hex()}:{_scrypt(password, salt).hex()}", is_admin)


def check_password(user: User, password: str) -> None:
    """Check the user's password. Takes about 30 ms by design.

    Raises:
        ApiError: IncorrectPasswordError.
    """
    salt, _, expected = user.password.partition(":")
    if not hmac.compare_digest(_scrypt(password, bytes.fromhex(salt)), bytes.fromhex(expected)):
        raise ApiError("IncorrectPasswordError", _INCORRECT)


def payload_of(caller: Caller) -> dict[str, Any]:
    """The payload of the caller's token, as the token check returns it."""
    token = caller.token
    return {**_claims(token.user, token.issued_at_s, token.expires_at_s), "admin": caller.user.is_admin}


def _claims(user: str, issued_at_s: int, expires_at_s: int | None) -> dict[str, Any]:
    end = {} if expires_at_s is None else {"exp": expires_at_s}
    return {"username": user, "application": expires_at_s is None, "iat": issued_at_s, **end}


def _is_alive(token: Token, now_s: float) -> bool:
    return token.expires_at_s is None or now_s < token.expires_at_s


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(errors="surrogatepass"), salt=salt, **_SCRYPT)


def _digest(token_text: str) -> str:
    # A fast hash is enough: a token has 256 random bits and cannot be guessed.
    return hashlib.sha256(token_text.encode(errors="surrogatepass")).hexdigest()


def _encoded(values: dict[str, Any]) -> str:
    return _base64(json.dumps(values, separators=(",", ":")).encode())


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
