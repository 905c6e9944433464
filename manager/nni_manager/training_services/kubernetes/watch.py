"""All objects that a selector chooses, as they change: listed once, then watched, never polled.

A watch that ends is taken up where it ended. Only when the server has forgotten that moment (410) are the objects listed
again, and what was removed meanwhile is told then. While the server is away nothing is told but that.

Source: Kubernetes API Concepts, Efficient detection of changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nni_manager.errors import NniManagerError
from nni_manager.training_services.kubernetes.api import Document, Kubernetes
from nni_manager.training_services.kubernetes.errors import Forbidden, HistoryGone
from nni_manager.training_services.kubernetes.resources import Resource

logger = logging.getLogger(__name__)

# A server that ends every watch at once is not asked more often than this.
_SHORTEST_WATCH_S = 1.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 20.0


@dataclass(frozen=True, slots=True)
class Seen:
    """An object as it is now."""

    document: Document


@dataclass(frozen=True, slots=True)
class Gone:
    """An object as it was last; there is none of that name and uid any more."""

    document: Document


@dataclass(frozen=True, slots=True)
class Listed:
    """Everything that is there has been told."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why nothing can be told at present; empty when it can be again."""

    message: str


@dataclass(frozen=True, slots=True)
class Denied:
    """This login may not look there: nothing more is told. Only of a watch that one can do without."""

    message: str


Change = Seen | Gone | Listed | Trouble | Denied


class Watch:
    """Tells of changes from a thread of its own, in their order."""

    def __init__(
        self,
        cluster: Kubernetes,
        resource: Resource,
        namespace: str,
        selector: str,
        tell: Callable[[Change], None],
        *,
        fields: str = "",
        concerns: Callable[[Document], bool] = lambda _: True,
        is_optional: bool = False,
    ) -> None:
        """`selector` is of labels, `fields` of fields. `concerns`: which of those chosen are told of, and kept; asked from the
        watch's thread. `is_optional`: a login that may not look is no trouble.
        """
        self._cluster = cluster
        self._resource = resource
        self._where = (resource, namespace, selector)
        self._tell = tell
        self._fields, self._concerns, self._is_optional = fields, concerns, is_optional
        self._known: dict[str, Document] = {}
        """By uid."""
        self._trouble = ""
        self._must_end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{resource.plural}", daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    def end(self) -> None:
        """Tell nothing more."""
        self._must_end.set()

    def join(self) -> None:
        """Wait for the thread; `end` was called, and the cluster closed, which cuts what it reads."""
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        since: str | None = None
        pause_s = _FIRST_PAUSE_S
        while not self._must_end.is_set():
            began_at_s = time.monotonic()
            try:
                if since is None:
                    since = self._list()
                events = self._cluster.watch(*self._where, since, self._fields)
                self._note("")
                for event in events:
                    since = event.version
                    self._take(event.kind, event.document)
                    pause_s = _FIRST_PAUSE_S
            except HistoryGone as gone:
                logger.info("%s", gone)
                since = None
            except NniManagerError as error:
                if self._is_optional and isinstance(error, Forbidden):
                    self._say(Denied(str(error)))
                    return
                self._note(str(error))
            except Exception as error:  # without this thread no job would ever end
                logger.exception("an answer is not understood")
                since = None
                self._note(
                    f"cannot watch {self._where[0].plural}: the answer of {self._cluster.address} is not understood "
                    f"({error!r}); it is asked again, see what is between it and this machine if this lasts"
                )
            else:
                pause_s = _FIRST_PAUSE_S
            if time.monotonic() - began_at_s < _SHORTEST_WATCH_S or self._trouble:
                self._must_end.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _list(self) -> str:
        found, version = self._cluster.objects(*self._where, self._fields, self._concerns)
        there = {document["metadata"]["uid"] for document in found}
        for uid in [uid for uid in self._known if uid not in there]:
            self._say(Gone(self._known.pop(uid)))
        for document in found:
            self._take("ADDED", document)
        self._say(Listed())
        return version

    def _take(self, kind: str, document: Document) -> None:
        if kind == "BOOKMARK" or not self._concerns(document):
            return
        uid, version = document["metadata"]["uid"], document["metadata"]["resourceVersion"]
        if kind == "DELETED":
            self._known.pop(uid, None)
            self._say(Gone(document))
        elif (before := self._known.get(uid)) is None or before["metadata"]["resourceVersion"] != version:
            self._known[uid] = document
            self._say(Seen(document))

    def _note(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._say(Trouble(trouble))

    def _say(self, change: Change) -> None:
        if not self._must_end.is_set():
            self._tell(change)
