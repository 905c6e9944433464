"""The cost of many Kubernetes jobs for the API server: calls per job, and calls while all jobs run."""

import asyncio
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deadlines import DEADLINE_S

# Modules that tests and benchmarks share, such as kube_site, are in tests/fakes.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import pytest
from kube_controllers import FRAMEWORKS
from kube_kubelet import StillPod
from kube_site import KubeSite, a_site
from kube_store import PODS
from real_experiment import until
from table import Row, render

from nni_manager.training_services.kubernetes import api

JOBS, FEW = 200, 20
REST_S = 40.0
# The manager reopens a watch after this time, which is a sixth of the real time. So the measured 40 s contain two watches of each
# kind.
WATCHES_INTERVAL_S = 20


@dataclass(frozen=True)
class Calls:
    """The number of calls: in total from the first submission to the last deletion, and per minute while
    all jobs run.
    """

    in_all: int
    a_minute: float


def calls_of_jobs(jobs: int = JOBS, few: int = FEW, rest_s: float = REST_S) -> list[Row]:
    """API calls per job with many concurrent jobs, and API calls per minute while all jobs run; both compared with few jobs."""
    of_many, of_few = _calls_of(jobs, rest_s), _calls_of(few, rest_s)
    per_job, per_job_of_few = of_many.in_all / jobs, of_few.in_all / few
    return [
        Row(
            f"API calls for a job on Kubernetes, {jobs} at once (pods without processes)",
            f"{per_job:.2f}",
            f"{few} at once {per_job_of_few:.2f}",
            f"{per_job / per_job_of_few:.2f} x",
            "<= 1 x",
            per_job <= per_job_of_few,
        ),
        Row(
            f"the same a minute while {jobs} run (watches start again every {WATCHES_INTERVAL_S} s)",
            f"{of_many.a_minute:.1f}, {of_many.a_minute / jobs:.2f} for each job",
            f"{few} jobs {of_few.a_minute:.1f}",
            f"{of_many.a_minute / max(of_few.a_minute, 1):.2f} x",
            # The two measurements may differ by one watch of each of the three kinds, because a watch may time out just before or
            # just after the end of a measurement.
            "as many, +- a watch of each kind",
            of_many.a_minute <= of_few.a_minute + 3 * 60 / rest_s,
        ),
    ]


def _calls_of(jobs: int, rest_s: float) -> Calls:
    with tempfile.TemporaryDirectory() as folder, _a_cluster(Path(folder)) as site:
        return asyncio.run(_count(site, jobs, rest_s))


@contextmanager
def _a_cluster(folder: Path):
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(api, "WATCH_S", WATCHES_INTERVAL_S)
        with a_site(folder, patches, StillPod) as site:
            yield site


async def _count(site: KubeSite, jobs: int, rest_s: float) -> Calls:
    asked, store = site.cluster.api.asked, site.store
    names = [f"env-{number}" for number in range(jobs)]
    async with site.manager() as service:
        await asyncio.gather(*(service.submit(site.settings(name)) for name in names))
        await until(
            lambda: store.count(PODS, lambda pod: pod["status"]["phase"] == "Running") == jobs,
            *("all run", DEADLINE_S),
        )
        before = len(asked)
        await asyncio.sleep(rest_s)
        while_they_run = len(asked) - before
        for pod in store.list(PODS):
            for container in site.cluster.node.processes("default", pod["metadata"]["name"]):
                container.send_signal(0)
        await until(lambda: len(site.ends) == jobs, "all have ended", DEADLINE_S)
        await until(lambda: not store.count(FRAMEWORKS), "all are cleared away", DEADLINE_S)
        assert {end.exit_code for end in site.ends} == {0}, "an end has the wrong exit code"
        return Calls(len(asked), while_they_run * 60 / rest_s)


if __name__ == "__main__":
    print(render(calls_of_jobs()))
