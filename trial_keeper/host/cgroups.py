"""The keeper's own control group, for its memory and OOM kills, and a trial's group where the keeper may create groups.

In a container with a cgroup namespace, /proc/self/cgroup contains `/`. Without a namespace it contains the path on the machine,
but the mount shows the container's group, or only groups below that. Hence both places are searched.

Source: cgroups(7), proc_pid_mountinfo(5), the kernel's cgroup-v1/memory.rst and cgroup-v2.rst.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.small_files import read_all

ROOT = Path("/")
# v1's value for "no limit" is the largest number of pages in bytes, which depends on the machine.
_NO_LIMIT_FROM = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """The control group that accounts for this process's memory. An unreadable value is None, or 0 for a count."""

    folder: Path
    version: int

    @classmethod
    def own(cls, root: Path = ROOT) -> "MemoryCgroup | None":
        """This process's group; None if the kernel accounts for no memory or shows no group.

        `root` contains `proc` and the mounts.
        """
        for version, controller in ((1, "memory"), (2, "")):
            folder = _own_folder(controller, root)
            if folder is not None and (folder / _COUNTER[version]).is_file():
                return cls(folder, version)
        return None

    def oom_kills(self) -> int:
        """The number of processes of this group that the kernel has killed for lack of memory."""
        for line in _read(self.folder / _COUNTER[self.version]).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdecimal():
                return int(value)
        return 0

    def pids(self) -> frozenset[int]:
        """The processes in this group."""
        return frozenset(map(int, _read(self.folder / "cgroup.procs").split()))

    def shortage(self) -> str:
        """Describe a kill of the kernel for lack of memory, with the remedy."""
        limit_bytes, peak_bytes = self.limit_bytes(), self.peak_bytes()
        if limit_bytes is not None:
            found = f"the container's memory limit of {limit_bytes / 2**20:.0f} MiB was reached"
        else:
            found = "the machine's memory was full"
            if peak_bytes is not None:
                found += f" (this container has used up to {peak_bytes / 2**20:.0f} MiB of it)"
        return (
            f"{found}, and the kernel killed a process of the trial; "
            "request more memory in the experiment file or use a smaller batch"
        )

    def limit_bytes(self) -> int | None:
        """The lowest limit of this group and its visible parents; None if there is none."""
        limits = []
        for folder in (self.folder, *self.folder.parents):
            text = _read(folder / ("memory.limit_in_bytes", "memory.max")[self.version - 1])
            if not text:
                break
            if text.strip().isdecimal() and int(text) < _NO_LIMIT_FROM:
                limits.append(int(text))
        return min(limits, default=None)

    def peak_bytes(self) -> int | None:
        """The highest memory usage ever; on v2 available since Linux 5.19."""
        text = _read(self.folder / ("memory.max_usage_in_bytes", "memory.peak")[self.version - 1]).strip()
        return int(text) if text.isdecimal() else None


_COUNTER = {1: "memory.oom_control", 2: "memory.events"}


class TrialCgroup:
    """A control group with a trial's processes only, so that the kernel can kill all of them in one step.

    The group complements the scan of processes: no process can leave it with a fork, and killing it also kills processes of other
    users, which the keeper may not signal. It requires cgroup v2, Linux 5.14 and write access to the keeper's own group, which
    most containers lack. Moving a process takes the kernel 7 ms, during which the trial runs but cannot fork.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def around(cls, pid: int, root: Path = ROOT) -> "TrialCgroup | None":
        """Move a process into its own new group; None if that is not possible."""
        own = _own_folder("", root)
        # cgroup.kill is missing in the machine's root group.
        if own is None or not os.access(own / "cgroup.kill", os.W_OK):
            return None
        group = cls(own / f"trial-{pid}")  # `of` finds it by this name
        try:
            group._folder.mkdir()
            (group._folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            group.remove()
            return None
        return group

    @classmethod
    def of(cls, pid: int, root: Path = ROOT) -> "TrialCgroup | None":
        """The group that `around` created for this process, which may have ended; None if there is none."""
        own = _own_folder("", root)
        folder = None if own is None else own / f"trial-{pid}"
        return cls(folder) if folder is not None and folder.is_dir() else None

    def kill(self) -> None:
        """Send SIGKILL to all processes of the group."""
        with contextlib.suppress(OSError):
            (self._folder / "cgroup.kill").write_text("1")

    def pids(self) -> list[int]:
        """The processes of the group, without zombies."""
        return [int(pid) for pid in _read(self._folder / "cgroup.procs").split()]

    def remove(self) -> None:
        """Remove the group, unless it still contains a process."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()


@cache
def _own_folder(controller: str, root: Path) -> Path | None:
    """The visible folder of this process's group, of a v1 controller or of v2 for "".

    Cached: a keeper never changes its group.
    """
    path = _own_path(controller, _read(root / "proc/self/cgroup"))
    mounts = list(_mounts(controller, _read(root / "proc/self/mountinfo")))
    if path is None or not mounts:
        return None
    for top, point in mounts:
        for below in (_below(top, path), path):
            if (
                below is not None
                and ".." not in below
                and (folder := root / (point + below).lstrip("/")).is_dir()
            ):
                return folder
    return root / mounts[0][1].lstrip("/")


def _below(top: str, path: str) -> str | None:
    top = top.rstrip("/")
    return path[len(top) :] if path == top or path.startswith(f"{top}/") else None


def _own_path(controller: str, text: str) -> str | None:
    for line in text.splitlines():
        # 4:memory:/path, and 0::/path for v2
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path and controller in controllers.split(","):
            return path
    return None


def _mounts(controller: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the group at the root and the mount point of each mount of the hierarchy."""
    for line in text.splitlines():
        mount, _, source = line.partition(" - ")
        match mount.split(), source.split():
            case [_, _, _, top, point, *_], [kind, *_, options] if (
                kind == "cgroup" and controller in options.split(",") if controller else kind == "cgroup2"
            ):
                yield _unescaped(top), _unescaped(point)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return os.fsdecode(read_all(str(path)))
    return ""
