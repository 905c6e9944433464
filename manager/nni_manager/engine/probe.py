"""The session of a probe, which only tests whether a keeper would be admitted."""

import asyncio

from nni_manager.domain.admission_errors import ProtocolError
from trial_keeper import __version__
from trial_keeper.wire.messages import KeeperMessage, ManagerMessage, Welcome


class ProbeSession:
    """Sends Welcome and ends the stream, without effect on the session of the job's real keeper."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[ManagerMessage | None] = asyncio.Queue()
        """The messages to send; None ends the stream."""
        self.outgoing.put_nowait(Welcome(__version__))
        self.outgoing.put_nowait(None)

    async def ready(self) -> None:
        """Return at once."""

    def receive(self, message: KeeperMessage) -> None:
        """Refuse the message: nothing may follow the Hello of a probe.

        Raises:
            ProtocolError: always.
        """
        raise ProtocolError(
            f"cannot accept {type(message).__name__} from a probe; use the doctor of the manager's version"
        )

    def closed(self) -> None:
        """Do nothing: a probe has no state."""
