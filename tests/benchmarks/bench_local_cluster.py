"""What the local OpenPAI cluster costs: from the submission of a job to the first line of its commands, and many jobs at once."""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The shared helpers lie with the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from real_cluster import commands, log, run, running, settings, until
from table import Row, render

ALONE = 15
TOGETHER = 100
SAYS_WHEN = "date +%s.%N"


def submission() -> list[Row]:
    """Submission to the first line of a job by itself, and the time per job of a hundred; beside bare processes."""
    with tempfile.TemporaryDirectory() as folder:
        alone_ms, together_ms = asyncio.run(_measured(Path(folder)))
    bare_ms = statistics.median(_bare_ms() for _ in range(ALONE))
    many_ms = sum(_bare_ms() for _ in range(TOGETHER)) / TOGETHER
    floor = "bare bash {:.1f} ms"
    return [
        Row(
            "local OpenPAI: submit -> first line of the task",
            f"{alone_ms:.0f} ms",
            floor.format(bare_ms),
            f"{alone_ms / bare_ms:.0f} x",
            "<= 100 ms",
            alone_ms <= 100,
        ),
        Row(
            f"local OpenPAI: {TOGETHER} jobs, each",
            f"{together_ms:.0f} ms",
            floor.format(many_ms),
            f"{together_ms / many_ms:.0f} x",
            "<= 60 ms",
            together_ms <= 60,
        ),
    ]


async def _measured(folder: Path) -> tuple[float, float]:
    async with running(settings(folder)) as cluster:
        delays = []
        for number in range(ALONE):
            name = f"alone{number}"
            began_at_s = time.time()
            await run(cluster, commands(SAYS_WHEN, name=name))
            delays.append(float(await log(cluster, name)) - began_at_s)
        began_at_s = time.monotonic()
        names = [f"together{number}" for number in range(TOGETHER)]
        await asyncio.gather(*(cluster.submit("alice", commands(SAYS_WHEN, name=name)) for name in names))

        async def all_are_over() -> bool:
            await asyncio.sleep(0.05)  # the list itself costs something
            return all(job.completed_at_s is not None for job in await cluster.jobs())

        await until(all_are_over)
        return 1000 * statistics.median(delays), 1000 * (time.monotonic() - began_at_s) / TOGETHER


def _bare_ms() -> float:
    began_at_s = time.time()
    said = subprocess.run(["bash", "-c", SAYS_WHEN], capture_output=True, check=True)
    return 1000 * (float(said.stdout) - began_at_s)


if __name__ == "__main__":
    print(render(submission()))
