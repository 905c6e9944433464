"""Flood the keepers' port as another user, until this process is killed: python flooder.py PORT.

After every hundred connections, print the number of connections opened so far.
"""

import collections
import os
import socket
import sys
import time

from hostile_keeper import OPENING
from strangers import NOBODY

_OPEN_AT_ONCE = 300
_PAUSE_S = 0.002
_STEP = 100
# If nothing kills this process, it ends after this time. This limits the load on the machine.
_MAX_S = 300.0


def main() -> None:
    """Keep a fixed number of connections open; each new connection replaces the oldest."""
    os.setresuid(NOBODY, NOBODY, NOBODY)
    deadline_s = time.monotonic() + _MAX_S
    peers: collections.deque[socket.socket] = collections.deque()
    opened = printed = 0
    while time.monotonic() < deadline_s:
        try:
            peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5)
            peers.append(peer)
            peer.sendall(OPENING)
            opened += 1
        except OSError:
            # The manager may refuse or close a connection; it should do so when its limit is reached.
            pass
        if len(peers) > _OPEN_AT_ONCE:
            peers.popleft().close()
        if opened >= printed + _STEP:
            printed = opened
            print(opened, flush=True)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
