"""Authentication over HTTP: login, tokens, users. `Authenticator.authenticated` protects all other routes.

Source: microsoft/pai v1.8.1, REST server: controllers/v2/basic-login, token, user; middlewares/token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nni_manager.local_openpai import response_bodies
from nni_manager.local_openpai.accounts import Accounts, Caller, User, new_user, payload_of
from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.errors import ApiError, StateBusy, bad_token, invalid_parameters
from nni_manager.local_openpai.login_throttle import LoginThrottle, source_of
from nni_manager.local_openpai.request_bodies import fields_of, text_in
from nni_manager.support.http_server import mark_authenticated

log = logging.getLogger("nni_manager.local_openpai.authentication")

Handler = Callable[[Request, Caller], Awaitable[Response]]

MIN_EXPIRATION_S, MAX_EXPIRATION_S = 60, 604_800


class Authenticator:
    """The accounts over HTTP. `store` persists them after each change; `clock` returns seconds since the epoch."""

    def __init__(
        self,
        cluster: Cluster,
        accounts: Accounts,
        store: Callable[[Accounts], None],
        clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._accounts = accounts
        self._store = store
        self._clock = clock
        self._throttle = LoginThrottle(accounts.login)

    def routes(self) -> list[Route]:
        """The routes below /v2."""
        authenticated = self.authenticated
        return [
            Route("/authn/info", self.login_info),
            Route("/authn/basic/login", self.log_in, methods=["POST"]),
            Route("/authn/basic/logout", authenticated(self.log_out), methods=["DELETE"]),
            Route("/tokens", self.log_in, methods=["POST"]),
            Route("/tokens", authenticated(self.tokens)),
            Route("/tokens/application", authenticated(self.new_application_token), methods=["POST"]),
            Route("/tokens/check", authenticated(self.check_token)),
            Route("/tokens/{token}", authenticated(self.revoke_token), methods=["DELETE"]),
            Route("/users", authenticated(self.users), methods=["GET"]),
            Route("/users", authenticated(self.add_user), methods=["POST"]),
            Route("/users", authenticated(self.update_user), methods=["PUT"]),
            Route("/users/me", authenticated(self.update_myself), methods=["PUT"]),
            Route("/users/{user}", authenticated(self.user), methods=["GET"]),
            # The path of LTP, OpenPAI's successor, whose body also has the name.
            Route("/users/{user}", authenticated(self.update_user), methods=["PUT"]),
            Route("/users/{user}", authenticated(self.remove_user), methods=["DELETE"]),
            Route("/users/{user}/password", authenticated(self.set_password), methods=["PUT"]),
            Route("/groups", authenticated(self.groups)),
            Route("/groups/{group}", authenticated(self.group)),
            Route("/groups/{group}/userlist", authenticated(self.members)),
        ]

    def authenticated(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler so that it requires a valid token."""

        async def endpoint(request: Request) -> Response:
            caller = self._caller(request)
            mark_authenticated(request.scope)
            request.scope["caller"] = caller
            return await handler(request, caller)

        return endpoint

    def _caller(self, request: Request) -> Caller:
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        match kind.lower():
            case "":
                raise ApiError("UnauthorizedUserError", "Guest is not allowed to do this operation.")
            case "bearer":
                return self._accounts.caller(value.strip(), self._clock())
            case "basic":
                try:
                    name, _, token = base64.b64decode(value, validate=True).decode().partition(":")
                except (binascii.Error, UnicodeDecodeError) as error:
                    raise bad_token() from error
                caller = self._accounts.caller(token, self._clock())
                if not caller.token.is_application or caller.name != name:
                    raise bad_token()
                return caller
            case _:
                raise bad_token()

    async def login_info(self, _: Request) -> Response:
        """The login method; no login required."""
        return JSONResponse(
            {"authn_type": "basic", "loginURI": "/api/v2/authn/basic/login", "loginURIMethod": "post"}
        )

    async def log_in(self, request: Request) -> Response:
        """Issue a token for a name and a password."""
        fields = await fields_of(request)
        name, password = text_in(fields, "username"), text_in(fields, "password")
        lifetime_s = _expiration(fields.get("expiration", MAX_EXPIRATION_S))
        await self._throttle.check(name, password, source_of(request))
        user = self._accounts.user(name)  # raises if the user was removed meanwhile
        with self._stored_change() as accounts:
            token = accounts.issue(name, self._clock(), lifetime_s)
        log.info("%s logged in", name)
        return JSONResponse({"user": name, "token": token, "admin": user.is_admin})

    async def log_out(self, _: Request, caller: Caller) -> Response:
        """Revoke the token of this request."""
        self._revoke(caller.token.text, caller)
        return JSONResponse({"message": "Logout successfully"})

    async def tokens(self, _: Request, caller: Caller) -> Response:
        """The caller's tokens without their signatures, which are not stored."""
        tokens = self._accounts.tokens_of(caller.name, self._clock())
        return JSONResponse({"tokens": [token.text for token in tokens]})

    async def new_application_token(self, _: Request, caller: Caller) -> Response:
        """Issue an application token, which does not expire."""
        with self._stored_change() as accounts:
            token = accounts.issue(caller.name, self._clock(), None)
        log.info("%s created an application token", caller.name)
        return JSONResponse({"token": token, "application": True})

    async def check_token(self, _: Request, caller: Caller) -> Response:
        """The payload of the caller's token."""
        return JSONResponse(payload_of(caller))

    async def revoke_token(self, request: Request, caller: Caller) -> Response:
        """Revoke a token."""
        self._revoke(request.path_params["token"], caller)
        return JSONResponse({"message": "revoke successfully"})

    def _revoke(self, token_text: str, caller: Caller) -> None:
        with self._stored_change() as accounts:
            accounts.revoke(token_text, caller)

    @contextlib.contextmanager
    def _stored_change(self) -> Iterator[Accounts]:
        """A change of the accounts, stored at the end of the block.

        Raises:
            StateBusy: it could not be stored, and is undone.
        """
        with self._accounts.change() as accounts:
            yield accounts
            try:
                self._store(accounts)
            except OSError as error:
                message = f"cannot store the accounts: {error}; free disk space, or try again later"
                raise StateBusy(message) from error

    # ---- users

    async def users(self, _: Request, caller: Caller) -> Response:
        """All users."""
        caller.must_be_admin()
        return JSONResponse([self._user_document(user) for user in self._accounts.users()])

    async def user(self, request: Request, _: Caller) -> Response:
        """One user."""
        return JSONResponse(self._user_document(self._accounts.user(request.path_params["user"])))

    async def add_user(self, request: Request, caller: Caller) -> Response:
        """Add a user."""
        caller.must_be_admin()
        fields = await fields_of(request)
        name, password = text_in(fields, "username"), text_in(fields, "password")
        user = await asyncio.to_thread(new_user, name, password, is_admin=fields.get("admin") is True)
        with self._stored_change() as accounts:
            accounts.add_user(user)
        log.info("%s added user %s", caller.name, name)
        return JSONResponse({"message": "User is created successfully"}, status_code=201)

    async def set_password(self, request: Request, caller: Caller) -> Response:
        """Set a user's password. All but administrators need the old one, and only for themselves."""
        fields, name = await fields_of(request), request.path_params["user"]
        user = self._accounts.user(name)
        if not (caller.user.is_admin and (caller.token.is_owners or not caller.token.is_application)):
            if caller.token.is_application or caller.name != name:
                raise ApiError(
                    "ForbiddenUserError", f"User {caller.name} is not allowed to do this operation."
                )
            await self._throttle.check(user.name, text_in(fields, "oldPassword"), source_of(request))
        await self._set_password(caller, user, text_in(fields, "newPassword"))
        return JSONResponse({"message": "update user password successfully."})

    async def _set_password(self, caller: Caller, user: User, password: str) -> None:
        changed = await asyncio.to_thread(new_user, user.name, password, is_admin=False)
        # The rights may have changed while the login throttle or the thread was awaited.
        is_admin = self._accounts.user(user.name).is_admin
        with self._stored_change() as accounts:
            accounts.replace_user(replace(changed, is_admin=is_admin))
        log.info("%s set the password of user %s", caller.name, user.name)

    async def update_user(self, request: Request, caller: Caller) -> Response:
        """Change a user's password or rights."""
        caller.must_be_admin()
        data = _data_of(await fields_of(request), {"username", "password", "admin"})
        user = self._accounts.user(text_in(data, "username"))
        if isinstance(is_admin := data.get("admin"), bool):
            with self._stored_change() as accounts:
                user = accounts.set_admin(user.name, is_admin)
            log.info(
                "%s made user %s %s",
                caller.name,
                user.name,
                "an administrator" if is_admin else "a plain user",
            )
        if "password" in data:
            await self._set_password(caller, user, text_in(data, "password"))
        return _updated(user)

    async def update_myself(self, request: Request, caller: Caller) -> Response:
        """Change the caller's own password."""
        if caller.token.is_application:
            raise ApiError("ForbiddenUserError", "Applications are not allowed to do this operation.")
        data = _data_of(await fields_of(request), {"username", "newPassword", "oldPassword"})
        if text_in(data, "username") != caller.name:
            raise ApiError("ForbiddenUserError", f"User {caller.name} is not allowed to do this operation.")
        if "newPassword" in data:
            await self._throttle.check(caller.name, text_in(data, "oldPassword"), source_of(request))
            await self._set_password(caller, caller.user, text_in(data, "newPassword"))
        return _updated(caller.user)

    async def remove_user(self, request: Request, caller: Caller) -> Response:
        """Remove a user; their jobs stay."""
        caller.must_be_admin()
        name = request.path_params["user"]
        if name not in (user.name for user in self._accounts.users()):
            raise ApiError("NoUserError", f"User {name} is not found.", status=404)
        with self._stored_change() as accounts:
            accounts.remove_user(name)
        log.info("%s removed user %s", caller.name, name)
        return JSONResponse({"message": "user is removed successfully"})

    # ---- groups

    async def groups(self, _: Request, __: Caller) -> Response:
        """All groups: one, with all users."""
        return JSONResponse([response_bodies.group(self._cluster.virtual_clusters)])

    async def group(self, request: Request, _: Caller) -> Response:
        """One group."""
        _check_group(request)
        return JSONResponse(response_bodies.group(self._cluster.virtual_clusters))

    async def members(self, request: Request, _: Caller) -> Response:
        """The users of a group."""
        _check_group(request)
        users = self._accounts.users()
        return JSONResponse([{"username": user.name, "clusterAdmin": user.is_admin} for user in users])

    def _user_document(self, user: User) -> dict[str, Any]:
        return {
            "username": user.name,
            "email": "",
            "grouplist": [response_bodies.GROUP],
            "extension": {},
            "admin": user.is_admin,
            "virtualCluster": [each.name for each in self._cluster.virtual_clusters],
            "storageConfig": [each.name for each in self._cluster.settings.storages],
        }


def _check_group(request: Request) -> None:
    if (name := request.path_params["group"]) != response_bodies.GROUP:
        raise ApiError("NoGroupError", f"Group {name} is not found.")


def _data_of(fields: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The changes of a request. What this machine does not have, such as an email address, must be empty."""
    data = fields.get("data")
    if not isinstance(data, dict):
        raise invalid_parameters("cannot find the object data in the request body; add it")
    for name, value in data.items():
        if name not in known and value:
            raise invalid_parameters(
                f"cannot change {name[:60]}: users of this machine have none; leave it out"
            )
    return data


def _updated(user: User) -> Response:
    return JSONResponse({"message": f"Update user {user.name} successfully."}, status_code=201)


def _expiration(value: Any) -> int:
    text = str(value)
    if not re.fullmatch("[0-9]{1,9}", text) or not MIN_EXPIRATION_S <= int(text) <= MAX_EXPIRATION_S:
        raise invalid_parameters(
            f"cannot use expiration {text[:60]!r}: use {MIN_EXPIRATION_S} to {MAX_EXPIRATION_S} seconds"
        )
    return int(text)
