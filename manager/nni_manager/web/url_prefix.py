"""Serves the whole application below a path prefix, for a proxy that shares one address among several servers."""

from starlette.responses import JSONResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class UrlPrefixMiddleware:
    """Passes requests below the prefix, and rejects all others. Redirects and links of the application then have the prefix."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """`prefix`: without a slash at its end; "" is none."""
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return  # the server has no websockets
        if not f"{scope['path']}/".startswith(f"{self._prefix}/"):
            error = f"cannot find this address: the addresses of this manager start with {self._prefix}/; add that"
            await JSONResponse({"error": error}, 404)(scope, receive, send)
            return
        if scope["path"] == self._prefix:
            # Relative to the address that the browser has, which may be a proxy's.
            await RedirectResponse(f"{self._prefix}/")(scope, receive, send)
            return
        await self._app({**scope, "root_path": self._prefix}, receive, send)


def path_of(scope: Scope) -> str:
    """The path of a request without the prefix."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path or "/"
