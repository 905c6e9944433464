"""Fixtures that many tests share."""

import asyncio
import contextlib
import gc
import importlib
import inspect
import logging
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from deadlines import scaled_s
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

if TYPE_CHECKING:
    from real_experiment import RealExperiment

# Each worker imports and collects all tests, whose objects exist until the worker ends. So Python's garbage collector starts only
# when pytest has collected the tests, and ignores these objects.
gc.disable()


class LoggersByName(dict[str, logging.Logger | logging.PlaceHolder]):
    """The loggers of a process, which one thread can iterate over while another thread creates a logger.

    Before each test, pytest 9.2 iterates over the loggers without logging's lock. At the same time, a server thread of a test may
    import a module, which creates a logger.
    """

    def values(self) -> Any:
        """A copy of the loggers."""
        return [*super().values()]


logging.root.manager.loggerDict = LoggersByName(logging.root.manager.loggerDict)

# `--hypothesis-profile` selects the number of examples of a property test. A test that sets its own number gives the reason.
EXAMPLES = {"quick": 10, "default": 25, "thorough": 400}
for profile, examples in EXAMPLES.items():
    # There is no deadline, because the duration of an example depends on other load. Each run uses the same examples. Only
    # `thorough` searches for new examples.
    hypothesis.settings.register_profile(
        profile, deadline=None, max_examples=examples, derandomize=profile != "thorough"
    )
hypothesis.settings.load_profile("default")
_OWN = pytest.StashKey[Path]()
BENCHMARKS = Path(__file__).parent / "benchmarks"


@pytest.fixture(autouse=True, scope="session")
def signals_of_a_terminal() -> None:
    """Reset signals that are ignored, for example because of nohup, to the handlers of a Python in a terminal.

    Processes that tests start would inherit the ignored signals.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Create a separate temporary folder for each run.

    With pytest's default folder, a second run of the same user would remove other users' access to the files of the first run.
    """
    if config.option.basetemp is None:
        config.option.basetemp = config.stash[_OWN] = Path(
            tempfile.gettempdir(), f"keeper-tests-{secrets.token_hex(4)}"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on a new event loop with a timeout."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), scaled_s(150)))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Scale the timeout of each test, as the deadlines within it are scaled."""
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit_s = marker.args[0] if marker is not None else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(scaled_s(limit_s)), append=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove this run's temporary folder, unless a test has failed."""
    own = session.config.stash.get(_OWN, None)
    if exitstatus == 0 and own is not None:
        shutil.rmtree(own, ignore_errors=True)


def pytest_collection_finish() -> None:
    """Start garbage collection."""
    gc.freeze()
    gc.enable()


# Long files start first. Otherwise one worker would run containers for minutes after the other workers have finished. These files
# start even before the other long files: their tests mostly wait, and leave the processors to the other workers.
WITH_LONG_WAITS = (
    "faults/test_kubernetes_remains.py",
    "faults/test_slurm.py",
    "faults/test_stop_converges.py",
    "faults/test_lost_lease.py",
)
FOLDERS = ("e2e", "contract", "faults", "integration", "unit")
WITH_CONTAINERS = (
    "test_container_jobs.py",
    "test_images.py",
    "test_kubernetes_containers.py",
    "test_local_cluster_containers.py",
    "test_openpai_on_this_machine.py",
)


# The contract tests of the platforms in this pattern take minutes, mostly spent waiting. So the tests of each platform are a
# group of their own: a single worker for all of these platforms would finish long after the other workers.
OF_PLATFORM = "tests/contract/platform "
PLATFORM_WITH_LONG_WAITS = re.compile(
    r"^tests/contract/test_platform(?:s|_jobs)\.py::.*[\[-](openpai|slurm-over-ssh|slurm|installed)(?!-of-this-machine)\b"
)


class ByFile(LoadScopeScheduling):
    """Assigns tests to processes in groups: the tests of a file, the contract tests of a platform with long waits, and all tests
    with containers. Groups with long waits start first, the others in the order of FOLDERS.
    """

    def _split_scope(self, nodeid: str) -> str:
        if platform := PLATFORM_WITH_LONG_WAITS.match(nodeid):
            return OF_PLATFORM + platform[1]
        file = nodeid.partition("::")[0]
        return "tests/e2e" if file.endswith(WITH_CONTAINERS) else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        # Among the groups with the lowest place, the group with the most tests starts first.
        longest = min(self.workqueue, key=_place)
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)


def _place(scope: str) -> int:
    if scope.endswith(WITH_LONG_WAITS) or scope.startswith(OF_PLATFORM):
        return -1
    return next((place for place, folder in enumerate(FOLDERS) if f"tests/{folder}" in scope), len(FOLDERS))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Replaces xdist's own scheduler. xdist groups tests by marks, but pytest 9.2 prevents it from adding the marks to the test
    names.
    """
    return ByFile(config, log)


@pytest.fixture
def open_way(tmp_path: Path) -> None:
    """Let other users enter this test's folder."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        with contextlib.suppress(PermissionError):
            folder.chmod(folder.stat().st_mode | 0o755)


@pytest.fixture
def a_real_experiment(tmp_path: Path) -> Iterator[Callable[..., "RealExperiment"]]:
    """Makes experiments, and ends their processes after the test."""
    from real_experiment import RealExperiment  # imports the whole manager, which few tests need

    made: list[RealExperiment] = []

    def make(train: str, **options: Any) -> RealExperiment:
        experiment = RealExperiment(tmp_path / f"experiment{len(made)}", train, **options)
        made.append(experiment)
        experiment.create()
        return experiment

    yield make
    for experiment in made:
        experiment.close()


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of tests/benchmarks by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    # Only modules of tests/benchmarks are removed, because some other modules, such as numpy, cannot be imported twice.
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]
