"""A cluster in a separate process that tests can kill.

Start it with `python cluster_process.py FOLDER`, and send commands as JSON lines. The commands are {"submit": TEXT} and {"stop":
NAME}. The process answers with a line when the command's change is stored.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from real_cluster import settings, stop

from nni_manager.local_openpai.cluster import Cluster


async def serve(folder):
    cluster = Cluster(settings(folder))
    await cluster.start()
    print("ready", flush=True)

    async def obey(line):
        order = json.loads(line)
        if "submit" in order:
            name = await cluster.submit("alice", order["submit"].encode())
        else:
            name = order["stop"]
            await stop(cluster, name)
        print(name, flush=True)

    orders = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        orders.add(asyncio.create_task(obey(line)))


class ClusterProcess:
    """Starts, controls and kills a cluster process."""

    def __init__(self, folder):
        with (Path(folder) / "cluster.stderr").open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        assert self.answer() == "ready"

    def order(self, **order):
        """Send a command without waiting."""
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self):
        """The next answer; empty after the end of the process."""
        return self._process.stdout.readline().strip()

    def kill(self):
        """Kill the process; return the answers it had sent before."""
        self._process.kill()
        self._process.wait()
        said = self._process.stdout.read().split()
        self._process.stdout.close()
        self._process.stdin.close()
        return said


if __name__ == "__main__":
    assert os.getpid() != 1
    asyncio.run(serve(Path(sys.argv[1])))
