"""Who asks: logging in, tokens, users. Everything else is behind `Entrance.known`.

Source: microsoft/pai v1.8.1, REST server: controllers/v2/basic-login, token, user; middlewares/token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nni_manager.local_openpai.accounts import (
    LONGEST_EXPIRATION_S,
    SHORTEST_EXPIRATION_S,
    Accounts,
    Caller,
    User,
    check_password,
    new_user,
    payload_of,
)
from nni_manager.local_openpai.bodies import fields_of, text_in
from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.refusals import Refused, bad_token, guest
from nni_manager.serving import keep_connection

log = logging.getLogger("nni_manager.local_openpai.entrance")

Handler = Callable[[Request, Caller], Awaitable[Response]]


class Entrance:
    """The accounts over HTTP. `store` keeps them whenever they have changed; `clock` is in seconds since the epoch."""

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

    def routes(self) -> list[Route]:
        """Those below /v2."""
        known = self.known
        return [
            Route("/authn/info", self.login_info),
            Route("/authn/basic/login", self.log_in, methods=["POST"]),
            Route("/authn/basic/logout", known(self.log_out), methods=["DELETE"]),
            Route("/tokens", self.log_in, methods=["POST"]),
            Route("/tokens", known(self.tokens)),
            Route("/tokens/application", known(self.new_application_token), methods=["POST"]),
            Route("/tokens/check", known(self.check_token)),
            Route("/tokens/{token}", known(self.revoke_token), methods=["DELETE"]),
            Route("/users", known(self.users), methods=["GET"]),
            Route("/users", known(self.add_user), methods=["POST"]),
            Route("/users/{user}", known(self.user), methods=["GET"]),
            Route("/users/{user}", known(self.remove_user), methods=["DELETE"]),
        ]

    def known(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """The handler, for those who said who they are."""

        async def endpoint(request: Request) -> Response:
            caller = self._caller(request)
            keep_connection(request.scope)
            request.scope["caller"] = caller
            return await handler(request, caller)

        return endpoint

    def _caller(self, request: Request) -> Caller:
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        match kind.lower():
            case "":
                raise guest()
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
        """How to log in; anybody may ask."""
        return JSONResponse(
            {"authn_type": "basic", "loginURI": "/api/v2/authn/basic/login", "loginURIMethod": "post"}
        )

    async def log_in(self, request: Request) -> Response:
        """A token for a name and a password."""
        fields = await fields_of(request)
        name, password = text_in(fields, "username"), text_in(fields, "password")
        lifetime_s = _expiration(fields.get("expiration", LONGEST_EXPIRATION_S))
        user = self._accounts.user(name)
        await asyncio.to_thread(check_password, user, password)
        self._accounts.user(name)  # still there
        token = self._accounts.issue(name, self._clock(), lifetime_s)
        self._store(self._accounts)
        log.info("%s logged in", name)
        return JSONResponse({"user": name, "token": token, "admin": user.is_admin})

    async def log_out(self, _: Request, caller: Caller) -> Response:
        """End the token with which this is asked."""
        self._revoke(caller.token.text, caller)
        return JSONResponse({"message": "Logout successfully"})

    async def tokens(self, _: Request, caller: Caller) -> Response:
        """The caller's tokens without their signatures: nobody keeps these."""
        tokens = self._accounts.tokens_of(caller.name, self._clock())
        return JSONResponse({"tokens": [token.text for token in tokens]})

    async def new_application_token(self, _: Request, caller: Caller) -> Response:
        """A token for a program, without end."""
        token = self._accounts.issue(caller.name, self._clock(), None)
        self._store(self._accounts)
        log.info("%s has a new token for applications", caller.name)
        return JSONResponse({"token": token, "application": True})

    async def check_token(self, _: Request, caller: Caller) -> Response:
        """What the caller's token says."""
        return JSONResponse(payload_of(caller))

    async def revoke_token(self, request: Request, caller: Caller) -> Response:
        """End a token."""
        self._revoke(request.path_params["token"], caller)
        return JSONResponse({"message": "revoke successfully"})

    def _revoke(self, token_text: str, caller: Caller) -> None:
        self._accounts.revoke(token_text, caller)
        self._store(self._accounts)

    # ---- users

    async def users(self, _: Request, caller: Caller) -> Response:
        """All users."""
        self._must_be_admin(caller)
        return JSONResponse([await self._user_document(user) for user in self._accounts.users()])

    async def user(self, request: Request, _: Caller) -> Response:
        """One user."""
        return JSONResponse(await self._user_document(self._accounts.user(request.path_params["user"])))

    async def add_user(self, request: Request, caller: Caller) -> Response:
        """Take in a user."""
        self._must_be_admin(caller)
        fields = await fields_of(request)
        name, password = text_in(fields, "username"), text_in(fields, "password")
        user = await asyncio.to_thread(new_user, name, password, is_admin=fields.get("admin") is True)
        self._accounts.add_user(user)
        self._store(self._accounts)
        log.info("%s added user %s", caller.name, name)
        return JSONResponse({"message": "User is created successfully"}, status_code=201)

    async def remove_user(self, request: Request, caller: Caller) -> Response:
        """Forget a user; their jobs stay."""
        self._must_be_admin(caller)
        name = request.path_params["user"]
        self._accounts.remove_user(name)
        self._store(self._accounts)
        log.info("%s removed user %s", caller.name, name)
        return JSONResponse({"message": "user is removed successfully"})

    async def _user_document(self, user: User) -> dict[str, Any]:
        return {
            "username": user.name,
            "email": "",
            "grouplist": ["default"],
            "extension": {},
            "admin": user.is_admin,
            "virtualCluster": [view.name for view in await self._cluster.virtual_clusters()],
            "storageConfig": [view.name for view in await self._cluster.storages()],
        }

    def _must_be_admin(self, caller: Caller) -> None:
        if caller.token.is_application:
            raise Refused("ForbiddenUserError", "Applications are not allowed to do this operation.")
        if not caller.user.is_admin:
            raise Refused("ForbiddenUserError", "Non-admin is not allowed to do this operation.")


def _expiration(value: Any) -> int:
    text = str(value)
    if not re.fullmatch("[0-9]{1,9}", text) or not SHORTEST_EXPIRATION_S <= int(text) <= LONGEST_EXPIRATION_S:
        raise Refused(
            "InvalidParametersError",
            f"cannot use expiration {text[:60]!r}: write seconds from {SHORTEST_EXPIRATION_S} to {LONGEST_EXPIRATION_S}",
        )
    return int(text)
