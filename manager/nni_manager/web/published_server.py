"""A web server together with the record in the experiment's folder by which this user's programs find it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection

from starlette.types import ASGIApp

from nni_manager.errors import NniManagerError
from nni_manager.store.certificate import Certificate
from nni_manager.store.folders import ExperimentFolder, ManagerProcess
from nni_manager.support.http_server import HttpServer, is_loopback
from nni_manager.support.server_tls import RenewableCertificate, TlsCertificate
from nni_manager.support.web_server_options import WebServerOptions
from trial_keeper import __version__


class PublishedServer:
    """The server of an application; `publish` writes the record, and so does a renewal of the certificate from then on."""

    def __init__(
        self,
        folder: ExperimentFolder,
        options: WebServerOptions,
        port: int,
        own_certificate: Callable[[], Certificate],
        *,
        is_view: bool = False,
        check_before: Callable[[], None] = lambda: None,
    ) -> None:
        """`own_certificate`: that for a server beyond loopback without files. `check_before` may raise to prevent publishing.

        Raises:
            TlsFilesUnusable: the files of the options cannot be used.
        """
        self._folder, self._options, self._port = folder, options, port
        self._is_view, self._check_before = is_view, check_before
        self._process: ManagerProcess | None = None
        self._held: int | None = None
        self._files = None if options.tls is None else RenewableCertificate(options.tls, self._renew)
        is_plain = self._files is not None or is_loopback(options.host)
        self._own = None if is_plain else own_certificate()

    @property
    def hosts(self) -> Collection[str]:
        """The host names in a certificate from files: requests for these are for this server."""
        return () if self._files is None else self._files.current.hosts

    def serving(self, app: ASGIApp) -> HttpServer:
        """The server of this application."""
        return HttpServer(app, self._files if self._own is None else self._own.path)

    def publish(self, token: str) -> None:
        """Write the record, which contains this token.

        Raises:
            Whatever `check_before` raises.
        """
        sha256 = None if self._own is None else self._own.sha256
        if self._files is not None:
            sha256 = self._files.current.sha256
        options = self._options
        # On loopback, a name would reach another machine.
        host = next(iter(self.hosts), "") if not is_loopback(options.host) else ""
        self._write(
            ManagerProcess(
                *(os.getpid(), options.host, self._port, __version__, token, sha256),
                url_prefix=options.url_prefix,
                certificate_host=host,
            )
        )

    def _renew(self, renewed: TlsCertificate) -> None:
        if self._process is not None:
            # Another manager owns the experiment now, and this one is about to exit.
            with contextlib.suppress(NniManagerError):
                self._write(dataclasses.replace(self._process, certificate_sha256=renewed.sha256))

    def _write(self, process: ManagerProcess) -> None:
        self._check_before()
        self._folder.write_process(process, is_view=self._is_view)
        self._process = process
        if not self._is_view:
            held, self._held = self._held, self._folder.open_process_file()  # until this process ends
            if held is not None:
                os.close(held)
