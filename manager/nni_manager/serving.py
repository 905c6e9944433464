"""What every HTTP server here is made of: a socket that says why it cannot listen, and uvicorn on the loop of its process."""

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from nni_manager.errors import CANNOT_LISTEN, UserMistake

# Other names of a server on loopback mean that some web page made the browser come here (DNS rebinding).
OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")


class PortUnusable(UserMistake):
    """cannot listen on the port; choose another"""


def listen(host: str, port: int, way_out: str) -> socket.socket:
    """A listening socket, before anything is started. From here on a client waits instead of being refused.

    Raises:
        PortUnusable: the port is taken; the message ends with `way_out`.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise PortUnusable(f"{CANNOT_LISTEN} on {host}:{port}: {error.strerror}; {way_out}") from error
    return listener


class HttpServer(uvicorn.Server):
    """HTTP on this loop; signals are the process's own business."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield
