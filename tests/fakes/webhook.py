"""A webhook on loopback that records what it receives."""

import http.server
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deadlines import DEADLINE_S


class Webhook(http.server.ThreadingHTTPServer):
    """Answers the first requests with `statuses`, and later requests with 204. `accepted` contains the bodies of the requests
    that were not refused.
    """

    daemon_threads = True

    def __init__(self, statuses: Sequence[int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses = [*statuses]
        self.refusals = 0
        self.accepted: queue.Queue[Any] = queue.Queue()

    @property
    def url(self) -> str:
        """The address. Its path is a secret, as with the webhooks of other services."""
        return f"http://127.0.0.1:{self.server_address[1]}/secret-path"

    def next(self) -> Any:
        """Wait for the next accepted body."""
        return self.accepted.get(timeout=DEADLINE_S)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        """Record one request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.server.statuses.pop(0) if self.server.statuses else 204
        if status < 400:
            self.server.accepted.put(body)
        else:
            self.server.refusals += 1
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log no request."""


@contextmanager
def a_webhook(*statuses: int) -> Iterator[Webhook]:
    """A webhook that runs until the end of the block."""
    with Webhook(statuses) as webhook:
        threading.Thread(target=webhook.serve_forever, daemon=True).start()
        yield webhook
        webhook.shutdown()
