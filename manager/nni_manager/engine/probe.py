"""The stream of somebody who only asks whether a keeper would be let in."""

import asyncio

from nni_manager.domain.refusals import ProtocolBroken
from trial_keeper import __version__
from trial_keeper.wire.messages import KeeperMessage, ManagerMessage, Welcome


class ProbeSession:
    """Welcome, and the end. Nobody else hears of it: the session of the job's real keeper goes on."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[ManagerMessage | None] = asyncio.Queue()
        """What to send; None ends the stream."""
        self.outgoing.put_nowait(Welcome(__version__))
        self.outgoing.put_nowait(None)

    async def ready(self) -> None:
        """At any time."""

    def receive(self, message: KeeperMessage) -> None:
        """Nothing may follow the Hello of a probe.

        Raises:
            ProtocolBroken: always.
        """
        raise ProtocolBroken(
            f"cannot take {type(message).__name__} from a probe; use the doctor that comes with the manager"
        )

    def closed(self) -> None:
        """The stream is gone, and nothing has to be forgotten."""
