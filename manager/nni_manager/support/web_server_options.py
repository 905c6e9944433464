"""How a web server listens: the options of `nnictl` for it, which a command passes to the server's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_manager.support.server_tls import TlsFiles
from trial_keeper.frozen_dataclass import dataclass

if TYPE_CHECKING:
    import argparse

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class WebServerOptions:
    """The options of the web server of a manager, of a view, and of the page of all experiments."""

    host: str = LOOPBACK
    """The listen address."""
    url_prefix: str = ""
    """The path before all addresses, such as `/lab/digits`; empty: none."""
    require_token: bool = False
    """True: on loopback, this user's own programs need the token, too. They do anyway with a prefix."""

    tls: TlsFiles | None = None
    """The certificate for HTTPS; None: the server's own, or on loopback HTTP."""

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options to the command line of a server's process."""
        parser.add_argument("--host", default=LOOPBACK, help="the listen address of the HTTP API")
        parser.add_argument(
            "--require_token",
            action="store_true",
            help="on loopback, require the token of this user's own programs, too",
        )
        parser.add_argument("--url_prefix", default="", help="the path before all addresses, as /lab/digits")
        parser.add_argument("--tls_certificate", help="a PEM file with the certificate for HTTPS")
        parser.add_argument("--tls_key", help="a PEM file with its key")

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> WebServerOptions:
        """The options of a parsed command line."""
        tls = TlsFiles.of(parsed.tls_certificate, parsed.tls_key)
        return cls(parsed.host, parsed.url_prefix, parsed.require_token, tls)

    def arguments(self) -> list[str]:
        """The command line that `add_to` and `of` read."""
        files = self.tls and [f"--tls_certificate={self.tls.certificate}", f"--tls_key={self.tls.key}"]
        return [
            "--host",  # two arguments: `client.experiments` reads them from the process
            self.host,
            *([f"--url_prefix={self.url_prefix}"] if self.url_prefix else []),
            *(["--require_token"] if self.require_token else []),
            *(files or []),
        ]
