"""Watches all objects that a selector matches: one list, then a watch, no polling.

A watch that ends is resumed from its last resource version. If the server has expired that version (410), the objects are
listed again, and deletions in between are reported then. While the server is unreachable, the watch reports only its failure.

Source: Kubernetes API Concepts, Efficient detection of changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from nni_manager.errors import NniManagerError
from nni_manager.support.backoff import delays_s
from nni_manager.training_services.kubernetes.api import Document, Kubernetes
from nni_manager.training_services.kubernetes.errors import Forbidden, ResourceExpired
from nni_manager.training_services.kubernetes.resources import Resource
from trial_keeper.frozen_dataclass import dataclass

logger = logging.getLogger(__name__)

# Throttles requests to a server that ends every watch immediately.
_MIN_WATCH_S = 1.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 20.0
# Rights are granted by people, who look at the result within minutes.
_DENIED_RETRY_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class Upserted:
    """The current state of an object."""

    document: Document


@dataclass(frozen=True, slots=True)
class Deleted:
    """The last state of a deleted object."""

    document: Document


@dataclass(frozen=True, slots=True)
class Synced:
    """All existing objects have been reported."""


@dataclass(frozen=True, slots=True)
class WatchFailed:
    """The reason why no changes arrive; empty once the watch works again.

    An optional watch sends it only if the login may not watch the objects.
    """

    message: str


Change = Upserted | Deleted | Synced | WatchFailed


class Watch:
    """Reports changes in order, from its own thread."""

    def __init__(
        self,
        cluster: Kubernetes,
        resource: Resource,
        namespace: str,
        selector: str,
        report: Callable[[Change], None],
        *,
        fields: str = "",
        concerns: Callable[[Document], bool] = lambda _: True,
        is_optional: bool = False,
    ) -> None:
        """`selector` matches labels, `fields` matches fields. `concerns` filters the matches, on the watch's thread.

        `is_optional`: other watches report the same failures, except a missing right, which may be granted later.
        """
        self._cluster = cluster
        self._resource = resource
        self._where = (resource, namespace, selector)
        self._report = report
        self._fields, self._concerns, self._is_optional = fields, concerns, is_optional
        self._known: dict[str, Document] = {}
        """Objects by uid."""
        self._failure = ""
        self._must_end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{resource.plural}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Stop reporting."""
        self._must_end.set()

    def join(self) -> None:
        """Wait for the thread. Requires that `end` was called, and that the cluster was closed, which interrupts its read."""
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        since: str | None = None
        pauses_s = delays_s(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        while not self._must_end.is_set():
            started_at_s = time.monotonic()
            is_new_list = since is None
            try:
                if since is None:
                    since = self._list()
                    if not self._is_optional:  # its login may lack only the right to watch
                        self._note("")
                events = self._cluster.watch(*self._where, since, self._fields)
                self._note("")
                for kind, document in events:
                    since = str(document["metadata"]["resourceVersion"])
                    self._process(kind, document)
                    pauses_s = delays_s(_FIRST_PAUSE_S, _MAX_PAUSE_S)
            except ResourceExpired as error:
                logger.info("%s", error)
                since = None
                if not is_new_list:
                    # The server answers again: the pause that an outage has grown is over.
                    pauses_s = delays_s(_FIRST_PAUSE_S, _MAX_PAUSE_S)
                    continue
            except NniManagerError as error:
                is_denied = self._is_optional and isinstance(error, Forbidden)
                self._note(str(error), is_reported=is_denied)
                if is_denied:
                    since = None
                    self._must_end.wait(_DENIED_RETRY_DELAY_S)
                    continue
            except Exception as error:  # without this thread, no job's end is detected
                logger.exception("cannot parse an answer from Kubernetes")
                since = None
                self._note(
                    f"cannot watch {self._where[0].plural}: the answer of {self._cluster.login.address} cannot be parsed "
                    f"({error!r}); the watch is retried, check the proxies on the way if this persists"
                )
            else:
                pauses_s = delays_s(_FIRST_PAUSE_S, _MAX_PAUSE_S)
            if time.monotonic() - started_at_s < _MIN_WATCH_S or self._failure:
                self._must_end.wait(next(pauses_s))

    def _list(self) -> str:
        found, version = self._cluster.objects(*self._where, self._fields, self._concerns)
        there = {document["metadata"]["uid"] for document in found}
        for uid in [uid for uid in self._known if uid not in there]:
            self._emit(Deleted(self._known.pop(uid)))
        for document in found:
            self._process("ADDED", document)
        self._emit(Synced())
        return version

    def _process(self, kind: str, document: Document) -> None:
        if kind == "BOOKMARK" or not self._concerns(document):
            return
        uid, version = document["metadata"]["uid"], document["metadata"]["resourceVersion"]
        if kind == "DELETED":
            self._known.pop(uid, None)
            self._emit(Deleted(document))
        elif (before := self._known.get(uid)) is None or before["metadata"]["resourceVersion"] != version:
            self._known[uid] = document
            self._emit(Upserted(document))

    def _note(self, failure: str, *, is_reported: bool = False) -> None:
        if failure != self._failure:
            self._failure = failure
            if is_reported or not self._is_optional:
                self._emit(WatchFailed(failure))

    def _emit(self, change: Change) -> None:
        if not self._must_end.is_set():
            self._report(change)
