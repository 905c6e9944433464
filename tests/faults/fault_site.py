"""The environment of a run: two networks, two disks, two views of one storage, two clocks.

All resources are named after the run. A janitor process removes them at the end of the run, even if the run is killed. The
janitor waits for EOF on a pipe. Only the run has the write end of this pipe open.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from deadlines import DEADLINE_S, scaled_s
from fault_plan import DELAY_S, LOSS_SHARE, SLOW_STORAGE_S, STALE_STORAGE_S, Fault, Kind, Need, Plan
from free_ports import free_port_pair
from stepping_clock import Clock, build_clock, can_step_clocks
from transport_proxy import ProxyProcess

RUN = "FAULTS_RUN"
"""The environment variable that all processes of a run have; its value is the run's name."""
SUITE = "FAULTS_SUITE"
"""The environment variable that only the suite's own processes have."""
_FAKES = Path(__file__).parent.parent / "fakes"
_DISK_BYTES = 192 * 1024 * 1024
_STEP_TIMEOUT_S = scaled_s(30)
_RETRY_DELAY_S = 0.05
# The manager runs at the first address, and at the second after a fault has moved it. The network of the manager and the network
# of the jobs have routes only to each other.
_MANAGER_ADDRESSES = ("10.77.0.1", "10.77.0.3")
_JOBS_ADDRESS = "10.77.0.2"
_HERE = "127.0.0.1"
_ROAD_HERE = ("127.0.0.2", "127.0.0.3")


def run(*command: str | Path) -> str:
    """The output of the command.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    done = subprocess.run(
        [*map(str, command)],
        check=True,
        capture_output=True,
        text=True,
        timeout=_STEP_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout


@functools.cache
def missing_here() -> frozenset[Need]:
    """The capabilities that this machine lacks."""
    missing = set()
    is_root = os.geteuid() == 0
    if not is_root or not _works(_try_disk):
        missing.add(Need.ROOT)
    if not is_root or not _works(_try_networks):
        missing.add(Need.NETWORKS)
    if Need.ROOT in missing or not has_fuse():
        missing.add(Need.FUSE)
    if not can_step_clocks():
        missing.add(Need.CLOCK)
    return frozenset(missing)


def has_fuse() -> bool:
    """Whether this user can mount FUSE file systems."""
    return os.access("/dev/fuse", os.W_OK) and _works(_try_fuse)


def _works(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except (OSError, subprocess.SubprocessError, ImportError):
        return False
    return True


def _try_disk() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run("mount", "-t", "tmpfs", "none", folder)
        run("umount", folder)


def _try_networks() -> None:
    name = f"tkf-try-{os.getpid()}"
    run("ip", "netns", "add", name)
    try:
        run(
            *_inside(name),
            "iptables",
            "-w",
            "-A",
            "INPUT",
            "-m",
            "statistic",
            "--mode",
            "random",
            "--probability",
            "0",
            "-j",
            "DROP",
        )
    finally:
        run("ip", "netns", "del", name)


def _try_fuse() -> None:
    import mfusepy  # noqa: F401 - raises OSError where libfuse is missing

    if shutil.which("fusermount3") is None:
        raise FileNotFoundError("fusermount3")


def _inside(network: str) -> tuple[str, ...]:
    # `ip netns exec` would also create a mount namespace. The processes would then not see later mounts, so nsenter enters only
    # the network namespace.
    return ("nsenter", f"--net=/run/netns/{network}")


def processes_of(name: str) -> list[psutil.Process]:
    """All running processes of a run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(RUN) == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def mounts_of(folder: Path) -> list[str]:
    """The mounts in a run's folder, newest first."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [each for each in reversed(mounted) if each.startswith(f"{folder}{os.sep}")]


def networks_of(name: str) -> list[str]:
    """The network namespaces of a run."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(each for each in os.listdir("/run/netns") if each.startswith(f"{name}-"))
    return []


def clean_up(name: str, folder: Path) -> None:
    """Remove all resources of a run (processes, mounts, networks) except its evidence."""
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not _killed(name), "all of its processes have ended", DEADLINE_S)
    for mounted in mounts_of(folder):
        subprocess.run(["umount", "-l", mounted], check=False, timeout=_STEP_TIMEOUT_S)
    for network in networks_of(name):
        subprocess.run(["ip", "netns", "del", network], check=False, timeout=_STEP_TIMEOUT_S)


def _killed(name: str) -> list[psutil.Process]:
    left = processes_of(name)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return left


class Janitor:
    """Cleans up after a run, even if the process of the suite is killed."""

    def __init__(self, name: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, name, folder],
            stdin=subprocess.PIPE,
            # Ctrl-C must end only the suite, so that the janitor can clean up after it.
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(_FAKES), os.environ.get("PYTHONPATH", "")]),
            },
        )

    def clean_up(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(scaled_s(120))


class Disk:
    """A small separate disk that can be filled. Without root it is a plain folder, which cannot be filled."""

    def __init__(self, path: Path, is_real: bool) -> None:
        self.path = path
        self._filler = path / "filler"
        path.mkdir()
        if is_real:
            run("mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=755", "none", path)
            run("mount", "--make-private", path)

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file:
            status = os.statvfs(self.path)
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)
            for size in (4096, 1):
                with contextlib.suppress(OSError):
                    file.seek(0, os.SEEK_END)
                    while file.write(bytes(size)):
                        pass

    def empty(self) -> None:
        # Two faults may fill the disk at the same time. The end of the first fault has then already deleted the file.
        self._filler.unlink(missing_ok=True)


class Site:
    """The environment of one run. `heal` ends a fault; `close` removes everything."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.name = f"tkf-{os.getpid():x}-{plan.seed}-{int(time.time() * 1000) % 0xFFFFF:x}"
        self.folder = folder
        self._janitor = Janitor(self.name, folder)
        missing = missing_here()
        self.has_networks = Need.NETWORKS not in missing
        self._plan = plan
        self._lives = 0
        self._proxy: ProxyProcess | None = None
        self._storage_servers: list[subprocess.Popen[bytes]] = []
        self._proxy_delay_s = 0.0
        self.environ = os.environ | {RUN: self.name}
        self.suite_environ = self.environ | {SUITE: "yes"}
        self.ledgers = folder / "ledgers"
        self.ledgers.mkdir()
        self.manager_disk = Disk(folder / "manager", Need.ROOT not in missing)
        self.storage = Disk(folder / "storage", Need.ROOT not in missing)
        self.seen_by_manager = folder / "seen-by-manager"
        self.seen_by_jobs = folder / "seen-by-jobs"
        for view in (self.seen_by_manager, self.seen_by_jobs):
            self._show_storage(view, missing)
        if self.has_networks:
            self._make_networks()
        self.manager_clock: Clock | None = None
        self.jobs_clock: Clock | None = None
        if plan.steps_clocks:
            library = build_clock(folder)
            self.manager_clock = Clock(library, folder / "manager-clock")
            self.jobs_clock = Clock(library, folder / "jobs-clock")

    def close(self) -> None:
        if self._proxy is not None:
            self._proxy.close()
        self._janitor.clean_up()
        for server in self._storage_servers:
            server.wait(_STEP_TIMEOUT_S)

    # ---- storage

    def _show_storage(self, view: Path, missing: frozenset[Need]) -> None:
        if Need.ROOT in missing:
            view.symlink_to(self.storage.path)
            return
        view.mkdir()
        if not self._plan.has_far_storage:
            run("mount", "--bind", self.storage.path, view)
            # Faults change the mount of the manager or the mount of the jobs. A private mount keeps such a change out of the
            # other mount.
            run("mount", "--make-private", view)
            return
        with (self.folder / f"{view.name}.log").open("wb") as log:
            server = subprocess.Popen(
                [sys.executable, _FAKES / "far_storage.py", self.storage.path, view, self._faults_file(view)],
                env=self.suite_environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._storage_servers.append(server)
        wait_until(lambda: os.path.ismount(view), f"{view} is mounted", DEADLINE_S)
        run("mount", "--make-private", view)

    def _faults_file(self, view: Path) -> Path:
        return self.folder / f"{view.name}-faults.json"

    def _view(self, side: str) -> Path:
        return self.seen_by_manager if side == "manager" else self.seen_by_jobs

    def _set_storage(self, side: str, faults: dict[str, float]) -> None:
        file = self._faults_file(self._view(side))
        new = file.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.replace(file)

    def _make_read_only(self, side: str) -> None:
        # A mount with open writers cannot become read-only, so a read-only mount is put over it. Files that are already open stay
        # writable.
        view = self._view(side)
        unseen = self.folder / f"{view.name}-read-only"
        unseen.mkdir(exist_ok=True)
        run("mount", "--bind", view, unseen)
        run("mount", "-o", "remount,bind,ro", unseen)
        run("mount", "--bind", unseen, view)
        run("umount", unseen)

    # ---- networks

    @property
    def _networks(self) -> tuple[str, str]:
        return f"{self.name}-m", f"{self.name}-j"

    @property
    def manager_prefix(self) -> tuple[str, ...]:
        return _inside(self._networks[0]) if self.has_networks else ()

    @property
    def jobs_prefix(self) -> tuple[str, ...]:
        return _inside(self._networks[1]) if self.has_networks else ()

    def _make_networks(self) -> None:
        manager, jobs = self._networks
        for network in self._networks:
            run("ip", "netns", "add", network)
        run(
            "ip",
            "link",
            "add",
            "there",
            "netns",
            manager,
            "type",
            "veth",
            "peer",
            "name",
            "there",
            "netns",
            jobs,
        )
        for address in _MANAGER_ADDRESSES:
            run("ip", "-n", manager, "address", "add", f"{address}/24", "dev", "there")
        run("ip", "-n", jobs, "address", "add", f"{_JOBS_ADDRESS}/24", "dev", "there")
        for network in self._networks:
            for device in ("lo", "there"):
                run("ip", "-n", network, "link", "set", device, "up")

    def _drop(self, *matches: str) -> None:
        for network in self._networks:
            run(*_inside(network), "iptables", "-w", "-A", "INPUT", "-i", "there", *matches, "-j", "DROP")

    def _drop_nothing(self) -> None:
        for network in self._networks if self.has_networks else ():
            run(*_inside(network), "iptables", "-w", "-F", "INPUT")

    # ---- the manager's address

    def next_port(self) -> int:
        """A port for the manager's HTTP API; the port after it is for keepers."""
        self._lives += 1
        if self.has_networks:
            # No other program uses this network, so each port in it is free.
            return 20_000 + 2 * self._lives
        return free_port_pair()

    def open_road(self, port: int, has_moved: bool) -> tuple[str, str]:
        """Return the address at which keepers reach a manager that is about to start, and the address where the manager
        listens.
        """
        if self.has_networks:
            announced = _MANAGER_ADDRESSES[has_moved]
        else:
            announced = _ROAD_HERE[has_moved] if self._plan.has_road else _HERE
        if not self._plan.has_road:
            return announced, "0.0.0.0" if self.has_networks else _HERE
        if self._proxy is not None:
            self._proxy.close()
        at, to = f"{announced}:{port + 1}", f"{_HERE}:{port + 1}"
        self._proxy = ProxyProcess(at, to, self.manager_prefix, self.suite_environ)
        self._proxy.order(f"delay {self._proxy_delay_s}")
        return announced, _HERE

    def _set_delay(self, delay_s: float) -> None:
        self._proxy_delay_s = delay_s
        self._order(f"delay {delay_s}")

    def _order(self, text: str) -> int:
        assert self._proxy is not None
        return self._proxy.order(text)

    # ---- faults

    def begin(self, fault: Fault) -> bool:
        """Start a fault of disks, networks or clocks; return whether it affected anything."""
        match fault.kind:
            case Kind.MANAGER_DISK_FULL | Kind.STOP_ON_FULL_DISK:
                self.manager_disk.fill()
            case Kind.WORKSPACE_FULL:
                self.storage.fill()
            case Kind.WORKSPACE_READ_ONLY:
                self._make_read_only(fault.side)
            case Kind.STORAGE_SLOW:
                self._set_storage(fault.side, {"slow_s": SLOW_STORAGE_S})
            case Kind.STORAGE_STALE:
                self._set_storage(fault.side, {"stale_s": STALE_STORAGE_S})
            case Kind.LINK_DOWN | Kind.ATTEMPT_FORGED | Kind.SPECIAL_FILES:
                self._drop()
            case Kind.LINK_LOSSY:
                self._drop("-m", "statistic", "--mode", "random", "--probability", str(LOSS_SHARE))
            case Kind.LINK_SLOW:
                self._set_delay(DELAY_S)
            case Kind.LINK_BROKEN:
                return self._order("break") > 0
            case Kind.LINK_RESET:
                return self._order("reset") > 0
            case Kind.MANAGER_CLOCK:
                assert self.manager_clock is not None
                self.manager_clock.set_ahead(fault.step_s)
            case Kind.JOBS_CLOCK:
                assert self.jobs_clock is not None
                self.jobs_clock.set_ahead(fault.step_s)
            case _:
                raise ValueError(fault)
        return True

    def heal(self, fault: Fault) -> None:
        """End a lasting fault that `begin` started."""
        match fault.kind:
            case Kind.MANAGER_DISK_FULL | Kind.STOP_ON_FULL_DISK:
                self.manager_disk.empty()
            case Kind.WORKSPACE_FULL:
                self.storage.empty()
            case Kind.WORKSPACE_READ_ONLY:
                run("umount", "-l", self._view(fault.side))
            case Kind.STORAGE_SLOW | Kind.STORAGE_STALE:
                self._set_storage(fault.side, {})
            case Kind.LINK_DOWN | Kind.LINK_LOSSY | Kind.ATTEMPT_FORGED | Kind.SPECIAL_FILES:
                self._drop_nothing()
            case Kind.LINK_SLOW:
                self._set_delay(0)

    def leftovers(self) -> list[str]:
        """The experiment's processes that have not exited, without the suite's own processes."""
        left = []
        for process in processes_of(self.name):
            with contextlib.suppress(psutil.Error, OSError):
                if SUITE not in process.environ():
                    left.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        return left


def wait_until(is_true: Callable[[], object], what: str, timeout_s: float) -> None:
    """Poll until `is_true()` is true, because progress of other processes produces no event to wait for.

    Raises:
        TimeoutError: it was not true in time.
    """
    deadline_s = time.monotonic() + timeout_s
    never = threading.Event()
    while not is_true():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"after {timeout_s:g} s still not: {what}")
        never.wait(_RETRY_DELAY_S)


@contextlib.contextmanager
def a_site(plan: Plan, folder: Path) -> Iterator[Site]:
    """Make a site, and remove it after the block."""
    site = Site(plan, folder)
    try:
        yield site
    finally:
        site.close()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    clean_up(sys.argv[1], Path(sys.argv[2]))
