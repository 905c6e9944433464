"""The program that the manager runs on a machine over SSH: `trial-keeper serve-machine`.

It reads requests from stdin, and writes their answers and the ends of jobs to stdout. It ends at the end of its input, so with
the connection; the jobs that it has started run on. Needs no package beyond those of a keeper.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from nni_manager.support.leftovers import end_processes_of, kill_keeper, reap_job
from nni_manager.training_services.remote import frames
from nni_manager.training_services.remote.gpu_query import query_gpus
from nni_manager.training_services.remote.machine_jobs import MachineJobs
from trial_keeper import __version__
from trial_keeper.processes import ProcessIdentity
from trial_keeper.wire.safe_open import UnsafePath, open_beneath, safe_name
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.workspace import Workspace

# A request may wait for a disk, for the end of processes or for a driver.
_THREADS = 8
_PROBE_TIMEOUT_S = 3.0
_MAX_DEATH_S = 5.0
# Source: unix(7), sun_path.
_MAX_SOCKET_BYTES = 107
_FOLDERS = ("jobs", "trials")
_WITH_BODY = ("put",)

Answer = dict[str, Any] | tuple[dict[str, Any], bytes]


class MachineServer:
    """Answers the requests of one manager about one experiment, each on a thread of its own."""

    def __init__(self, output: BinaryIO) -> None:
        self._output, self._lock = output, threading.Lock()
        self._folder = Path.home() / ".cache" / "trial-keeper"
        self._workspace: Workspace | None = None
        self._ends = select.epoll()
        self._watched: dict[int, str] = {}
        """The pidfds of jobs that are watched, and their ids."""
        self._shells: list[subprocess.Popen[bytes]] = []
        self._jobs_lock = threading.Lock()

    def run(self, source: BinaryIO) -> None:
        """Answer until the end of the input."""
        self._output.write(frames.START)
        self._send({"version": __version__, "home": str(Path.home()), "python": sys.executable})
        threading.Thread(target=self._report_ends, daemon=True).start()
        with ThreadPoolExecutor(_THREADS) as pool:
            while (request := frames.read_frame(source)) is not None:
                pool.submit(self._answer, request)

    def _answer(self, request: frames.Frame) -> None:
        arguments = dict(request.header)
        number, name = arguments.pop("number"), arguments.pop("request")
        try:
            operation: Callable[..., Answer | None] = getattr(self, f"do_{name}")
            if name in _WITH_BODY:
                operation = partial(operation, request.body)
            answer = operation(**arguments) or {}
        except OSError as error:
            answer = {"error": f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"}
        except Exception as error:  # noqa: BLE001 - the manager waits for an answer, and has the log
            answer = {"error": f"{type(error).__name__}: {error}"}
        header, body = answer if isinstance(answer, tuple) else (answer, b"")
        self._send({"number": number, **header}, body)

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        # The end of the connection is noticed at the input.
        with self._lock, contextlib.suppress(OSError):
            self._output.write(frames.encode(header, body))
            self._output.flush()

    # ---- the experiment

    @property
    def _root(self) -> Path:
        assert self._workspace is not None, "open was not called"
        return self._workspace.root

    @property
    def _jobs(self) -> MachineJobs:
        return MachineJobs(self._root / "jobs")

    def do_open(self, key: str, experiment_id: str, is_manager: bool) -> Answer:
        """Create the experiment's folder. `key`: the machine, which may share its home with others. Returns the folder.

        `is_manager`: the server of the manager's earlier connection, which may still have requests, is killed first.
        """
        home = self._folder / safe_name(key)
        root = home / safe_name(experiment_id)
        for folder in (root, *(root / name for name in _FOLDERS)):
            folder.mkdir(0o700, parents=True, exist_ok=True)
        for folder in (self._folder, home, root):
            folder.chmod(0o700)
        self._workspace = Workspace(root.resolve())
        if is_manager:
            self._replace_server(root / "server")
        return {"root": str(self._root)}

    def _replace_server(self, file: Path) -> None:
        with contextlib.suppress(OSError, ValueError):
            pid, ticks, boot_id = file.read_text().split()
            earlier = ProcessIdentity(int(pid), int(ticks), boot_id)
            descriptor = earlier.open_pidfd() if earlier.pid != os.getpid() else None
            if descriptor is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                select.select([descriptor], [], [], _MAX_DEATH_S)
                os.close(descriptor)
        own = ProcessIdentity.of(os.getpid())
        assert own is not None
        replace_file(file, " ".join(map(str, own)).encode(), 0o600)

    def do_remove(self, key: str, experiment_id: str) -> None:
        """Remove the experiment's folder, after the end of its processes, and code that no experiment uses."""
        home = self._folder / safe_name(key)
        root = home / safe_name(experiment_id)
        if root.is_dir():
            end_processes_of(Workspace(root.resolve()))
            shutil.rmtree(root)
        for code in (home / "code").glob("*"):
            if code.stat().st_nlink == 1:
                code.unlink()

    # ---- files; each path is relative to the experiment's folder

    def _path(self, path: str) -> Path:
        relative = Path(path)
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"cannot use {path}: it is outside the experiment's folder")
        return self._root / relative

    def do_mkdir(self, path: str) -> None:
        """Create a folder and its parents."""
        self._path(path).mkdir(0o700, parents=True, exist_ok=True)

    def do_has_code(self, path: str, digest: str) -> Answer:
        """Whether the file has this SHA-256, after it was linked from the code that earlier experiments have left."""
        target, kept = self._path(path), self._kept(digest)
        if not target.exists() and kept.exists() and _digest_of(kept) == digest:
            os.link(kept, target)
        return {"has": target.exists() and _digest_of(target) == digest}

    def do_put(self, body: bytes, path: str, offset: int, part: str, is_last: bool, digest: str = "") -> None:
        """Write a piece of a file; with the last piece, the file appears. `digest`: the SHA-256 of code, which is kept.

        Raises:
            OSError: the file cannot be written, or what has arrived has another digest.
        """
        target = self._path(path)
        target.parent.mkdir(0o700, parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.{safe_name(part)}")
        with new.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(body)
        if not is_last:
            return
        if digest and _digest_of(new) != digest:
            new.unlink()
            raise OSError(0, f"what has arrived of {path} has another digest")
        new.replace(target)
        if digest:
            kept = self._kept(digest)
            kept.parent.mkdir(0o700, exist_ok=True)
            with contextlib.suppress(OSError):  # another experiment was first, or the storage has no links
                os.link(target, kept)

    def _kept(self, digest: str) -> Path:
        return self._root.parent / "code" / safe_name(digest)

    def do_read(self, path: str, offset: int, longest: int) -> Answer:
        """Up to `longest` bytes of a file; none if there is no such file. A trial may have replaced it by anything."""
        try:
            descriptor = open_beneath(self._root, self._path(path))
        except (FileNotFoundError, NotADirectoryError, UnsafePath):
            return {}
        try:
            return {}, os.pread(descriptor, min(longest, frames.MAX_BODY_BYTES), offset)
        finally:
            os.close(descriptor)

    def do_folders(self, path: str) -> Answer:
        """The names of the folders in a folder; none if there is no such folder."""
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(self._path(path)) as entries,
        ):
            return {"names": [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]}
        return {"names": []}

    # ---- jobs

    def do_start(self, job_id: str, settings: dict[str, str]) -> Answer:
        """Start a job, unless it was started before; returns its state."""
        with self._jobs_lock:
            shell = self._jobs.start(job_id, Workspace(self._root).run_sh, settings)
            if shell is not None:
                self._shells.append(shell)
        return self.do_watch([job_id])

    def do_watch(self, job_ids: list[str]) -> Answer:
        """The states of jobs. The ends of those that run will be reported."""
        with self._jobs_lock:
            for job_id in job_ids:
                self._watch(job_id)
        return {"jobs": {job_id: self._jobs.state(job_id).to_json() for job_id in job_ids}}

    def do_signal(self, job_id: str, signal_number: int) -> Answer:
        """Send a signal to the keeper of a job."""
        return {"is_sent": self._jobs.signal(job_id, signal_number)}

    def do_kill(self, job_id: str) -> None:
        """Kill a keeper that ignores SIGTERM, and everything that it has started."""
        if (pid := self._jobs.state(job_id).pid) is not None:
            kill_keeper(pid, Workspace(self._root), job_id)

    def do_reap(self, job_id: str, trial_ids: list[str]) -> None:
        """Kill the processes that a job has left."""
        reap_job(Workspace(self._root), job_id, trial_ids)

    def _watch(self, job_id: str) -> bool:
        """Let the next change of a job's state be reported. False: it has ended."""
        if job_id in self._watched.values():
            return True
        descriptor = self._jobs.open_pidfd(job_id)
        if descriptor is not None:
            self._watched[descriptor] = job_id
            self._ends.register(descriptor, select.EPOLLIN)
        return descriptor is not None

    def _report_ends(self) -> None:
        try:
            self._report_each_end()
        except Exception:  # noqa: BLE001 - the process ends
            # Without reports, the manager would wait for these jobs forever. It connects again, and looks at all jobs.
            traceback.print_exc()
            os._exit(1)

    def _report_each_end(self) -> None:
        while True:
            for descriptor, _ in self._ends.poll():
                self._ends.unregister(descriptor)
                with self._jobs_lock:
                    job_id = self._watched.pop(descriptor)
                    os.close(descriptor)
                    self._shells = [shell for shell in self._shells if shell.poll() is None]
                    state = self._jobs.state(job_id)
                    # If its shell was killed, the keeper runs. It may end before it is watched.
                    while state.is_known and not state.has_ended and not self._watch(job_id):
                        state = self._jobs.state(job_id)
                if state.has_ended:
                    self._send({"ended": job_id, "job": state.to_json()})

    # ---- the machine

    def do_gpus(self) -> Answer:
        """The GPUs, and those on which processes compute."""
        return query_gpus()._asdict()

    def do_probe(self, host: str, port: int) -> Answer:
        """Whether a program listens at this address, seen from here."""
        try:
            socket.create_connection((host, port), _PROBE_TIMEOUT_S).close()
        except OSError:
            return {"is_reachable": False}
        return {"is_reachable": True}

    def do_free_socket(self) -> Answer:
        """Remove the socket of an earlier connection; returns the path for the next one, which is always the same.

        Raises:
            OSError: another user has made the folder of sockets.
        """
        path = self._root / "manager.sock"
        if len(os.fsencode(path)) > _MAX_SOCKET_BYTES:
            folder = Path("/tmp") / f"trial-keeper-{os.geteuid()}"
            folder.mkdir(0o700, exist_ok=True)
            found = folder.lstat()
            if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
                raise OSError(0, f"{folder} is not a folder of this user alone; remove it")
            path = folder / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}.sock"
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return {"path": str(path)}


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def main() -> int:
    """Serve until the end of the input. Nothing else may write to the output."""
    with open(os.dup(1), "wb") as output, open(os.dup(0), "rb") as source:
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        with contextlib.suppress(BrokenPipeError):
            MachineServer(output).run(source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
