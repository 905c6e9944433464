"""A cluster in a process of its own, to be killed: `python cluster_process.py FOLDER`, then orders as lines of JSON.

{"submit": TEXT} and {"stop": NAME} are each answered by a line when they are durable.
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
    """Starts one, talks to it, kills it."""

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
        """Say it, and do not wait."""
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self):
        """The next answer; empty when it is gone."""
        return self._process.stdout.readline().strip()

    def kill(self):
        """As a machine in trouble does; what it had answered by then."""
        self._process.kill()
        self._process.wait()
        said = self._process.stdout.read().split()
        self._process.stdout.close()
        self._process.stdin.close()
        return said


if __name__ == "__main__":
    assert os.getpid() != 1
    asyncio.run(serve(Path(sys.argv[1])))
