"""The cost of the local OpenPAI cluster: the delay until a job's first command runs, and the time for many concurrent jobs."""

import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from deadlines import scaled_s

# Modules that tests and benchmarks share, such as real_cluster, are in tests/fakes.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from real_cluster import commands, log, run, running, settings, until
from table import Row, render

from nni_manager.local_openpai.store import JobStore

ALONE = 15
TOGETHER = 100
SAYS_WHEN = "date +%s.%N"


def submission() -> list[Row]:
    """The time from the submission of a single job to its first output line, and the time per job of a hundred jobs; both
    compared with bare processes.
    """
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


def keeper_connected() -> list[Row]:
    """Time from the request of a job on the local OpenPAI until its keeper has connected, with one job per
    trial.
    """
    with tempfile.TemporaryDirectory() as folder:
        delays_ms = _connection_delays_ms(Path(folder))
    bare_ms = statistics.median(
        _took_ms(lambda: subprocess.run([sys.executable, "-c", ""], check=True)) for _ in range(ALONE)
    )
    delay_ms = statistics.median(delays_ms)
    return [
        Row(
            "local OpenPAI: submit -> keeper connected",
            f"{delay_ms:.0f} ms",
            f"python -c '' {bare_ms:.0f} ms",
            f"{delay_ms / bare_ms:.0f} x",
            "<= 25 x",
            delay_ms <= 25 * bare_ms,
        )
    ]


def _connection_delays_ms(home: Path) -> list[float]:
    work, storage = home / "work", home / "storage"
    work.mkdir()
    storage.mkdir()
    (work / "train.py").write_text(
        "import nni_sdk\nnni_sdk.report_final_result(nni_sdk.get_next_parameter()['x'])\n"
    )
    (work / "search_space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
    trial = {
        "command": "python3 train.py",
        "codeDir": ".",
        "gpuNum": 0,
        "cpuNum": 1,
        "memoryMB": 128,
        "image": "none is needed",
        "nniManagerNFSMountPath": str(storage),
        "containerNFSMountPath": "/mnt/confignfs-data",
        "paiStorageConfigName": "confignfs-data",
    }
    experiment = {
        "authorName": "bench",
        "experimentName": "bench",
        "trialConcurrency": 1,
        "maxTrialNum": ALONE,
        "trainingServicePlatform": "pai",
        "searchSpacePath": "search_space.json",
        "logDir": str(home / "experiments"),
        "tuner": {"builtinTunerName": "Random"},
        "trial": trial,
        "paiConfig": {"userName": "me", "token": "none-is-needed", "host": "local"},
    }
    # The file contains JSON, which is valid YAML.
    (work / "config.yml").write_text(json.dumps(experiment))
    environ = os.environ | {"HOME": str(home), "XDG_STATE_HOME": str(home / "state")}

    def nnictl(*arguments: str) -> None:
        subprocess.run(
            [Path(sys.executable).with_name("nnictl"), *arguments],
            env=environ,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=scaled_s(240),
        )

    # The service gets a free port, because the user's own service may use the default port.
    nnictl("openpai", "start", f"--port={_free_port()}", f"--storage={storage}")
    try:
        nnictl("create", "--config", str(work / "config.yml"), "--port", "auto", "--foreground")
    finally:
        nnictl("openpai", "stop-service")
    (log,) = home.glob("experiments/*/log/nnimanager.log")
    began_at_s, delays_ms = {}, []
    for line in log.read_text().splitlines():
        if (
            found := re.match(
                r"(\S+ [\d:]+),(\d+) .* (?:trial (\w+): WAITING|job (\w+): keeper .* connected)$", line
            )
        ) is None:
            continue
        at_s = time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S")) + int(found[2]) / 1000
        if found[3]:
            began_at_s[found[3]] = at_s
        else:
            delays_ms.append(1000 * (at_s - began_at_s[found[4]]))
    assert len(delays_ms) == ALONE
    return delays_ms


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _took_ms(action: Callable[[], object]) -> float:
    began_s = time.monotonic()
    action()
    return 1000 * (time.monotonic() - began_s)


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
            # Each list request lengthens the measured time, so the benchmark pauses before it sends the next one.
            await asyncio.sleep(0.05)
            return all(job.completed_at_s is not None for job in await cluster.read(JobStore.jobs))

        await until(all_are_over)
        return 1000 * statistics.median(delays), 1000 * (time.monotonic() - began_at_s) / TOGETHER


def _bare_ms() -> float:
    began_at_s = time.time()
    said = subprocess.run(["bash", "-c", SAYS_WHEN], capture_output=True, check=True)
    return 1000 * (float(said.stdout) - began_at_s)


if __name__ == "__main__":
    print(render([*submission(), *keeper_connected()]))
