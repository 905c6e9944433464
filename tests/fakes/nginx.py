"""A real nginx as a reverse proxy."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from real_experiment import free_port_pair, wait_until

from nni_manager.support.server_tls import TlsFiles

_CONF = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
user {user};
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder};
    server {{
        listen 127.0.0.1:{port}{front};
        location / {{ proxy_pass {scheme}://127.0.0.1:{target}; {settings} }}
    }}
}}
"""


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def nginx(
    folder: Path,
    target: int,
    user: str = "root",
    settings: str = "",
    front: TlsFiles | None = None,
    backend: TlsFiles | None = None,
    encrypts_backend: bool = False,
) -> Iterator[int]:
    """Run nginx as a reverse proxy for a port of this machine, with nginx's default headers and the given settings.

    Yields nginx's port. `front`: the certificate with which nginx serves HTTPS. `backend`: the certificate of the server behind
    nginx, which then uses HTTPS; nginx accepts no other certificate. `encrypts_backend`: the server uses HTTPS, and nginx accepts
    any certificate. nginx's workers run as `user`. Skips the test if nginx is not installed, or if the test does not run as root.
    """
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed (Debian: nginx-light)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to run nginx as another user")
    folder.mkdir()
    folder.chmod(0o777)
    port = free_port_pair()
    config = folder / "nginx.conf"
    if backend is not None:
        settings += f"proxy_ssl_verify on; proxy_ssl_trusted_certificate {backend.certificate}; proxy_ssl_name localhost;"
    config.write_text(
        _CONF.format(
            folder=folder,
            port=port,
            front=""
            if front is None
            else f" ssl; ssl_certificate {front.certificate}; ssl_certificate_key {front.key}",
            scheme="https" if backend is not None or encrypts_backend else "http",
            target=target,
            user=user,
            settings=settings,
        )
    )
    log = folder / "stderr"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(["nginx", "-c", config, "-p", folder], stderr=stderr) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or _listens(port), "nginx listens")
            assert process.poll() is None, log.read_text()
            yield port
        finally:
            process.terminate()
            process.wait(DEADLINE_S)
