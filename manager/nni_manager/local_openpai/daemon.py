"""Control of the local OpenPAI daemon: its folder, its status, start and stop.

The daemon is a separate process that outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import http
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from nni_manager.errors import RetryableError, UserError
from nni_manager.local_openpai.settings import Options
from nni_manager.startup import open_files
from nni_manager.store.owner_lock import OwnerLock, opened
from nni_manager.store.registry import state_of_user
from nni_manager.store.unusable_files import why_unusable
from nni_manager.support.loopback_auth import VerifiedConnection
from trial_keeper import __version__
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.processes import ProcessIdentity, terminate
from trial_keeper.wire.small_files import replace_file

T = TypeVar("T")

HOST = "127.0.0.1"
_POLL_S = 0.05
# Python and the libraries load in about a second, but take longer on a machine under full load.
_READY_TIMEOUT_S = 30.0
_ENDED_TIMEOUT_S = 30.0
_ANSWERS_TIMEOUT_S = 5.0

# References to the started daemons: Python reaps these children and does not warn about them when this process ends.
_started: list[subprocess.Popen[bytes]] = []


class ServiceFailed(UserError):
    """cannot start the local OpenPAI; see its last output"""


class ShutdownTimeout(RetryableError):
    """cannot stop the local OpenPAI; kill its process"""


class FolderUnusable(UserError):
    """cannot use the state directory; name another with --state-dir"""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The owner's credentials: a token that does not expire. The owner has no known password."""

    user: str
    token: str


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """The process of the running daemon, or of the last one."""

    pid: int
    start_ticks: int
    boot_id: str
    host: str
    version: str
    options: Options

    @classmethod
    def here(cls, host: str, options: Options) -> ServiceProcess:
        """The current process."""
        identity = ProcessIdentity.of(os.getpid())
        assert identity is not None  # this process is alive
        return cls(**identity._asdict(), host=host, version=__version__, options=options)

    def open_pidfd(self) -> int | None:
        """A pidfd of the process; None if the process has ended."""
        return ProcessIdentity(self.pid, self.start_ticks, self.boot_id).open_pidfd()

    @property
    def address(self) -> str:
        """HOST:PORT, for the `host` of an experiment file."""
        return f"{self.host}:{self.options.port}"


@dataclass(frozen=True, slots=True)
class Service:
    """The running daemon and its credentials. `token_is_valid` False: somebody has revoked the owner's token."""

    state: StateFolder
    process: ServiceProcess
    credentials: Credentials
    token_is_valid: bool = True


class StateFolder:
    """The daemon's state directory; closed to other users of the machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # The cluster's state directory: jobs, tasks and their logs.
        self.cluster = path / "cluster"
        # The folder of the default storage.
        self.storage = path / "storage"
        # Users and token hashes.
        self.accounts = path / "accounts.json"
        self.log = path / "service.log"
        # The stderr of a daemon in the background.
        self.stderr = path / "stderr.log"
        self._process_json = path / "service.json"
        self._credentials_json = path / "credentials.json"
        self._lock = OwnerLock(path / "owner.lock")

    @classmethod
    def of_user(cls) -> StateFolder:
        """The default folder of the user."""
        return cls(state_of_user() / "openpai")

    def check_files(self) -> None:
        """Check the files that the daemon opens, and those that its clients read.

        Raises:
            FolderUnusable: something else is in a file's place, or the file is closed to this user.
        """
        for path, remedy in {
            self._lock.path: "remove it",
            self._process_json: "remove it, and start the daemon again with its options",
            self._credentials_json: "remove it, and the next start makes a new token",
            self.accounts: "restore it from a copy, or remove it, which revokes all tokens",
            self.log: "remove it",
            self.stderr: "remove it",
        }.items():
            if why := why_unusable(path, remedy):
                raise FolderUnusable(why)

    def make(self) -> None:
        """Create the folder if necessary, check that it is ours, and close it to other users.

        Raises:
            FolderUnusable.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # An experiment may have created the storage folder before the daemon's first start.
            entries = {entry.name for entry in self.path.iterdir()} - {self.storage.name}
            # A lost lock file does not make the folder another program's.
            is_ours = (
                self._lock.path.name in entries or {self._process_json.name, self.accounts.name} <= entries
            )
            if entries and not is_ours:
                raise FolderUnusable(
                    f"cannot use {self.path} as state directory: it contains other files, such as {min(entries)}; "
                    "choose a new or an empty folder with --state-dir"
                )
            self.path.chmod(0o700)
            self._lock.path.touch(mode=0o600)  # marks the folder as ours
        except OSError as error:
            raise FolderUnusable(
                f"cannot use {self.path} as state directory: {error.strerror}; name another with --state-dir"
            ) from error
        self.check_files()

    @contextlib.contextmanager
    def restarts_alone(self) -> Iterator[None]:
        """Wait until no other experiment restarts the daemon: its restart would lose a storage that this one adds.

        Raises:
            FolderUnusable: the folder cannot be used.
        """
        self.make()
        # Not in the folder, which has the daemon's own files only.
        path = self.path.with_name(f"{self.path.name}.restart.lock")
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(opened(path, os.O_RDWR | os.O_CREAT))
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                raise FolderUnusable(
                    f"cannot lock {path}: {error.strerror}; name another folder with --state-dir, or fix the disk"
                ) from error
            yield

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the lock of the folder: one daemon at a time.

        Raises:
            ServiceFailed: another daemon holds it.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._lock.owned())
            except BlockingIOError as error:
                raise ServiceFailed(
                    f"cannot start the local OpenPAI in {self.path}: it is already running; see `nnictl openpai status`"
                ) from error
            yield

    def is_owned(self) -> bool:
        """True if a daemon holds the folder, including one that is starting or stopping.

        Raises:
            FolderUnusable: the folder cannot be read, or one of its files.
        """
        self.check_files()
        try:
            return self._lock.is_owned()
        except OSError as error:
            raise FolderUnusable(
                f"cannot read {self.path}: {error.strerror}; name another with --state-dir"
            ) from error

    def process(self) -> ServiceProcess | None:
        """The process of the running or last daemon; None before the first one was ready."""
        return _read(
            self._process_json,
            lambda document: ServiceProcess(**{**document, "options": Options(**document["options"])}),
        )

    def write_process(self, process: ServiceProcess) -> None:
        """Publish the process of the running daemon."""
        replace_file(self._process_json, json.dumps(asdict(process)).encode(), 0o600, is_durable=True)

    def credentials(self) -> Credentials | None:
        """The owner's credentials; None before the first start."""
        # Earlier versions also wrote a password; the next start of the daemon removes the password.
        return _read(
            self._credentials_json, lambda document: Credentials(document["user"], document["token"])
        )

    def write_credentials(self, credentials: Credentials) -> None:
        """Store the owner's credentials, readable by the owner only."""
        replace_file(self._credentials_json, json.dumps(asdict(credentials)).encode(), 0o600, is_durable=True)


def _read(path: Path, make: Callable[[dict[str, Any]], T]) -> T | None:
    try:
        return make(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FolderUnusable(
            f"cannot read {path}: {error}; stop the daemon if it is running, remove this file, and start the daemon again"
        ) from error


# ---- status


def running(state: StateFolder) -> Service | None:
    """The daemon that runs there and answers; None if there is none. One that was stopped (SIGSTOP) is woken.

    Raises:
        FolderUnusable: the folder cannot be read.
    """
    if not state.is_owned():
        return None
    process, credentials = state.process(), state.credentials()
    if process is None or credentials is None:
        return None  # still starting
    # A daemon that has just started may answer at the address in the record of the last one.
    if not wake(state):
        return None
    service = Service(state, process, credentials)
    try:
        status, _ = ask(service, "GET", "/tokens/check")
    except (OSError, ValueError, http.client.HTTPException):
        return None
    is_known = status in (http.HTTPStatus.OK, http.HTTPStatus.UNAUTHORIZED)
    return replace(service, token_is_valid=status == http.HTTPStatus.OK) if is_known else None


def ask(service: Service, verb: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Ask the REST API of the daemon with the owner's token; return the status and the document of the answer.

    Raises:
        OSError, ValueError, http.client.HTTPException: no answer, or that of another process on the daemon's port.
    """
    host, port = service.process.host, service.process.options.port
    headers = {"Authorization": f"Bearer {service.credentials.token}", "Content-Type": "application/json"}
    with contextlib.closing(VerifiedConnection(host, port, timeout=_ANSWERS_TIMEOUT_S)) as connection:
        connection.request(verb, f"/api/v2{path}", None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def wake(state: StateFolder) -> bool:
    """Continue the daemon of the record: one that a debugger or a batch system has stopped never answers. False: it has ended.

    Raises:
        FolderUnusable: the folder cannot be read.
    """
    return _signal(state.process(), signal.SIGCONT)


def _signal(process: ServiceProcess | None, number: int, wait_s: float = 0.0) -> bool:
    """Signal a daemon, and wait for its end for up to `wait_s`. True: it was there to be signalled."""
    descriptor = None if process is None else process.open_pidfd()
    if descriptor is None:
        return False
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
        select.select([descriptor], [], [], wait_s)  # readable when the process has ended
    finally:
        os.close(descriptor)
    return True


# ---- start and stop


def last_options(state: StateFolder) -> Options:
    """The options of the last start."""
    last = state.process()
    return last.options if last else Options()


def start(state: StateFolder, options: Options | None = None) -> Service:
    """Start a daemon in the background and return it once it answers. `options` None: those of the last start.

    If another process starts a daemon in the same folder at the same time, that daemon is returned.

    Raises:
        ServiceFailed: the daemon could not be started; no process is left running.
        FolderUnusable: the folder cannot be used.
    """
    state.make()
    options = options or last_options(state)
    arguments = ["-m", "nni_manager.local_openpai", f"--state-dir={state.path}", *options.to_arguments()]
    child: subprocess.Popen[bytes] | None = None
    try:
        with state.stderr.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, *arguments],
                # Python imports from the working directory, which must not contain the user's files.
                cwd=state.path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        # A manager, which has raised its limit, may start the daemon, which gives its jobs the limit that it finds.
        open_files.restore_limit(child.pid)
        service = _wait_until_ready(state, child)
    except BaseException:
        if child is not None:
            _abort_start(child)
        raise
    _started.append(child)
    return service


def with_valid_token(service: Service, options: Options | None = None) -> Service:
    """The running daemon with a token that it accepts: one whose token was revoked is restarted, and its tasks continue.

    `options` are for a restart; None: those that the daemon has.

    Raises:
        ServiceFailed, ShutdownTimeout, FolderUnusable.
    """
    if service.token_is_valid:
        return service
    stop(service.state)
    return start(service.state, options or service.process.options)


def _wait_until_ready(state: StateFolder, child: subprocess.Popen[bytes]) -> Service:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_S)
            other = running(state)
            if other is not None:
                return other
            if not state.is_owned():
                raise ServiceFailed(_last_output(state.stderr, child.returncode))
            # The daemon of another process is still starting.
            time.sleep(_POLL_S)
            continue
        process = state.process()
        if process is not None and process.pid == child.pid:
            service = running(state)
            if service is not None:
                return service
    raise ServiceFailed(
        f"cannot start the local OpenPAI in {state.path}: it was not ready within {_READY_TIMEOUT_S:.0f} s; "
        f"reduce the load of this machine and try again, or see {state.log}"
    )


def _last_output(stderr: Path, exit_code: int) -> str:
    lines = stderr.read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "no output"
    if last.startswith("cannot"):
        return last
    return (
        f"cannot start the local OpenPAI: the daemon exited with code {exit_code}: {last}; "
        f"see {stderr}, and report a repeated failure"
    )


def _abort_start(child: subprocess.Popen[bytes]) -> None:
    for end in (child.terminate, child.kill):
        if child.poll() is None:
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_ENDED_TIMEOUT_S)


def replace_unresponsive(state: StateFolder) -> None:
    """Kill a daemon that owns the folder and does not answer, and start another one, which adopts its jobs.

    Raises:
        ServiceFailed: the other one cannot start.
        FolderUnusable: the folder cannot be read.
    """
    process = state.process()
    if process is None or not state.is_owned() or running(state) is not None:
        return
    if _signal(process, signal.SIGKILL, _ENDED_TIMEOUT_S):
        start(state, process.options)


def stop(state: StateFolder) -> ServiceProcess | None:
    """Stop the daemon and return its process; None if none ran. Tasks continue, and the next daemon adopts them.

    Raises:
        ShutdownTimeout: the daemon does not end, or does not become ready to receive the stop.
        FolderUnusable: the folder cannot be read.
    """
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while state.is_owned():
        process = state.process()
        descriptor = None if process is None else process.open_pidfd()
        if process is not None and descriptor is not None:
            has_ended = terminate(descriptor, _ENDED_TIMEOUT_S)
            _started[:] = [child for child in _started if child.poll() is None]
            if has_ended:
                return process
            raise ShutdownTimeout(
                f"cannot stop the local OpenPAI in {state.path}: process {process.pid} ignores SIGTERM; "
                f"run `kill -9 {process.pid}`, which loses no stored data"
            )
        if time.monotonic() > deadline_s:
            raise ShutdownTimeout(
                f"cannot stop the local OpenPAI in {state.path}: the daemon is not ready within {_READY_TIMEOUT_S:.0f} s; "
                f"see {state.log}, and try again"
            )
        time.sleep(_POLL_S)  # still starting or stopping
    return None
