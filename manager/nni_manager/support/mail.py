"""An e-mail of text, sent through the user's mail server."""

import contextlib
import getpass
import smtplib
import socket
import ssl
from email.message import EmailMessage
from urllib.parse import unquote, urlsplit

_TIMEOUT_S = 10.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class LoginNeedsEncryption(OSError):
    """The server has no STARTTLS, and the login would be readable on the network."""


def send_mail(server_url: str, sender: str | None, recipient: str, subject: str, text: str) -> None:
    """Send an e-mail.

    `server_url`: "smtps://user:password@host:465" with TLS, "smtp://host:25" without; a login needs STARTTLS there, except on
    this machine. Name and password are percent-encoded. `sender` None: the login if it is an address, else user at host.

    Raises:
        OSError: the server cannot be reached, or refuses; of smtplib, an `SMTPException`.
    """
    url = urlsplit(server_url)
    host = url.hostname or ""
    user, password = unquote(url.username or ""), unquote(url.password or "")
    message = EmailMessage()
    message["Subject"] = subject
    message["From"] = sender or (user if "@" in user else f"{getpass.getuser()}@{socket.getfqdn()}")
    message["To"] = recipient
    message.set_content(text)
    with contextlib.ExitStack() as stack:
        if url.scheme == "smtps":
            context = ssl.create_default_context()
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                host, url.port or smtplib.SMTP_SSL_PORT, timeout=_TIMEOUT_S, context=context
            )
            stack.enter_context(server)
        else:
            server = stack.enter_context(
                smtplib.SMTP(host, url.port or smtplib.SMTP_PORT, timeout=_TIMEOUT_S)
            )
            if user and host not in _LOOPBACK:
                server.ehlo()
                if not server.has_extn("starttls"):
                    raise LoginNeedsEncryption(f"{host} has no STARTTLS, which a login needs")
                server.starttls(context=ssl.create_default_context())
        if user:
            server.login(user, password)
        server.send_message(message)
