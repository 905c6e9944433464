"""A real systemd as process 1 of separate namespaces, over a copy-on-write view of this machine's files.

It starts none of the machine's units, has no network except a separate loopback interface, and changes nothing outside the
namespaces. Source: systemd 252 of Debian 12; its container interface for what a container must mount.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S, scaled_s
from real_experiment import wait_until

INIT = Path("/lib/systemd/systemd")
PROGRAMS = ("unshare", "nsenter", "ip", "useradd", "runuser", "pgrep", "curl")
REPOSITORY = Path(__file__).parents[2]
# $1 is the folder for systemd's view of this machine's files. Changes to files of the view are kept in memory, and disappear with
# the namespaces.
_SETUP = r"""
set -euo pipefail
mount -t tmpfs tmpfs "$1"
mkdir "$1"/{upper,work,root,empty}
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs sys/fs/cgroup
mkdir sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
mount -t tmpfs tmpfs run
mount -t tmpfs -o mode=1777 tmpfs var/tmp
mount -t tmpfs tmpfs dev
for name in null zero full random urandom tty; do touch "dev/$name"; mount --bind "/dev/$name" "dev/$name"; done
mkdir dev/shm; chmod 1777 dev/shm; ln -s /proc/self/fd dev/fd
# None of the machine's own units starts.
for folder in {lib,etc}/systemd/system/*.wants; do mount --bind "$1/empty" "$folder"; done
printf '[Unit]\nDescription=nothing\nDefaultDependencies=no\n' > etc/systemd/system/nothing.target
ip link set lo up
exec env -i container=test PATH="$PATH" chroot . /lib/systemd/systemd --system --unit=nothing.target --log-target=console
"""


def why_not_here() -> str | None:
    """Why this machine cannot run a systemd of the tests; None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not INIT.exists() or missing:
        return f"{', '.join(missing) or 'systemd'} not installed"
    if os.geteuid() != 0:
        return "namespaces of tests are made by root"
    if any(os.stat(each).st_dev != os.stat("/").st_dev for each in (sys.prefix, sys.base_prefix, REPOSITORY)):
        return "the view has one file system, and the installation is on another"
    if not Path("/sys/fs/cgroup/systemd").is_dir():
        return "this machine has no control groups of systemd's own (version 1)"
    return None


class Systemd:
    """The running systemd."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "systemd.log"
        view = folder / "view"
        view.mkdir()
        with self.log.open("wb") as log:
            self._unshare = subprocess.Popen(
                ["unshare", "--fork", "--kill-child", "--pid", "--mount", "--cgroup", "--uts", "--ipc", "--net", "bash", "-c",
                 _SETUP, "bash", str(view)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(self._is_up, f"systemd runs; see {self.log}")

    def _is_up(self) -> bool:
        assert self._unshare.poll() is None, f"systemd does not start here: {self.log.read_text()}"
        return self.pid is not None and self.ask("systemctl is-system-running").stdout == "running\n"

    @property
    def pid(self) -> int | None:
        """The pid of systemd outside of its namespaces; None before its start."""
        unshare = self._unshare.pid
        children = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
        found = [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "systemd\n"]
        return found[0] if found else None

    def ask(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a bash script as root in the namespaces of systemd."""
        enter = [
            "nsenter",
            f"--target={self.pid}",
            "--mount",
            "--pid",
            "--ipc",
            "--uts",
            "--net",
            "--cgroup",
            "--root",
            "--wdns=/",
        ]
        return subprocess.run(
            [*enter, "bash", "-ec", script],
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled_s(100),
            check=False,
        )

    def run(self, script: str) -> str:
        """Run a bash script like `ask`; return its stdout. A failing script fails the test."""
        done = self.ask(script)
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        return done.stdout

    def close(self) -> None:
        """Kill everything in the namespaces."""
        self._unshare.kill()
        self._unshare.wait(DEADLINE_S)


@contextlib.contextmanager
def a_systemd(folder: Path) -> Iterator[Systemd]:
    """A running systemd. In its view of the files, trial-keeper is installed in /opt/trial-keeper for all users."""
    if reason := why_not_here():
        pytest.skip(reason)
    with contextlib.closing(Systemd(folder)) as machine:
        # These commands let all users enter the folders of the installation, but only in systemd's view of the files.
        for path in (Path(sys.prefix), Path(sys.base_prefix), REPOSITORY):
            machine.run("".join(f"chmod a+rx '{each}'\n" for each in (path, *path.parents)))
        machine.run(f"mkdir -p /opt && ln -s '{sys.prefix}' /opt/trial-keeper")
        yield machine
