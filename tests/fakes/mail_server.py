"""A mail server on loopback that records what it receives."""

import queue
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult
from real_experiment import wait_until

# The server refuses an address with one of these names, both as a sender and as a recipient.
_REFUSED = {"nobody": "550 no such user", "busy": "450 try again later"}


class Mails:
    """Receives e-mails."""

    def __init__(self) -> None:
        self.received: queue.Queue[Any] = queue.Queue()
        self.logins: list[tuple[bytes, bytes]] = []

    async def handle_MAIL(  # noqa: N802 - aiosmtpd's name
        self, server: Any, session: Any, envelope: Any, address: str, options: Any
    ) -> str:
        """Accept or refuse a sender."""
        envelope.mail_from = address
        return _answer(address)

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, server: Any, session: Any, envelope: Any, address: str, options: Any
    ) -> str:
        """Accept or refuse a recipient."""
        envelope.rcpt_tos.append(address)
        return _answer(address)

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802 - aiosmtpd's name
        """Record one e-mail."""
        self.received.put(envelope)
        return "250 OK"

    def authenticate(
        self, server: Any, session: Any, envelope: Any, mechanism: str, auth_data: Any
    ) -> AuthResult:
        """Record one login. The password is `p:w`."""
        self.logins.append((auth_data.login, auth_data.password))
        return AuthResult(success=auth_data.password == b"p:w", handled=False)


def _answer(address: str) -> str:
    return _REFUSED.get(address.partition("@")[0], "250 OK")


class MailServer(Controller):
    """A mail server that counts its open connections. The count is needed because `stop` does not close them."""

    connections = 0

    def factory(self) -> SMTP:
        """The protocol of one connection."""
        controller = self

        class Connection(SMTP):
            def connection_made(self, transport: Any) -> None:
                controller.connections += 1
                super().connection_made(transport)

            def connection_lost(self, error: Exception | None) -> None:
                super().connection_lost(error)
                controller.connections -= 1

        return Connection(self.handler, **self.SMTP_kwargs)


@contextmanager
def a_mail_server(
    host: str = "127.0.0.1", context: ssl.SSLContext | None = None
) -> Iterator[tuple[Mails, int]]:
    """A mail server that runs until the end of the block, and its port."""
    mails = Mails()
    with socket.create_server((host, 0)) as probe:
        port = probe.getsockname()[1]
    controller = MailServer(
        mails,
        hostname=host,
        port=port,
        ssl_context=context,
        authenticator=mails.authenticate,
        auth_require_tls=False,
    )
    controller.start()
    try:
        yield mails, port
    finally:
        wait_until(lambda: controller.connections == 0, "the clients have disconnected")
        controller.stop()
