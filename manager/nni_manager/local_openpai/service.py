"""The local OpenPAI as programs of its user see it: its folder, whether it runs, and how it begins and ends.

It is a process of its own, which outlives whoever started it, as a cluster does.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from nni_manager import open_files
from nni_manager.errors import TryAgain, UserMistake
from nni_manager.local_openpai.options import Options
from nni_manager.own_http import OwnConnection
from nni_manager.store.folders import state_of_user
from nni_manager.store.owner_lock import OwnerLock
from nni_manager.store.process_identity import ProcessIdentity, terminate
from trial_keeper import __version__
from trial_keeper.wire.workspace import replace_file

T = TypeVar("T")

HOST = "127.0.0.1"
_POLL_S = 0.05
# Python and the libraries need a second; a machine under full load gets patience.
_READY_WITHIN_S = 30.0
_ENDED_WITHIN_S = 30.0
_ANSWERS_WITHIN_S = 5.0

# They may outlive this process. Until then somebody has to hold them: Python reaps what it holds, and warns of what is let go.
_started: list[subprocess.Popen[bytes]] = []


class ServiceFailed(UserMistake):
    """cannot start the local OpenPAI; its last words say why"""


class ServiceRuns(UserMistake):
    """cannot start the local OpenPAI: it runs already"""


class ServiceStuck(TryAgain):
    """cannot end the local OpenPAI; end its process by hand"""


class FolderUnusable(UserMistake):
    """cannot use the state directory; name another with --state-dir"""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How its owner enters: by password, or by a token without end."""

    user: str
    password: str
    token: str


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """The process that serves, or the last one that did."""

    pid: int
    start_ticks: int
    boot_id: str
    host: str
    version: str
    options: Options

    @classmethod
    def here(cls, host: str, options: Options) -> ServiceProcess:
        """This process."""
        identity = ProcessIdentity.of(os.getpid())
        assert identity is not None  # it asks
        return cls(**asdict(identity), host=host, version=__version__, options=options)

    @property
    def address(self) -> str:
        """HOST:PORT, for the `host` of an experiment file."""
        return f"{self.host}:{self.options.port}"


@dataclass(frozen=True, slots=True)
class Service:
    """The local OpenPAI that runs, and how to enter."""

    state: StateFolder
    process: ServiceProcess
    credentials: Credentials


@dataclass(frozen=True, slots=True)
class StateFolder:
    """Where the service keeps everything; closed to other users of the machine."""

    path: Path

    @classmethod
    def of_user(cls) -> StateFolder:
        """The one it has unless told otherwise."""
        return cls(state_of_user() / "openpai")

    @property
    def cluster(self) -> Path:
        """Jobs, tasks and their logs; the cluster's own."""
        return self.path / "cluster"

    @property
    def storage(self) -> Path:
        """The folder of the storage that there is unless others are named."""
        return self.path / "storage"

    @property
    def accounts(self) -> Path:
        """Users, and hashes of their tokens."""
        return self.path / "accounts.json"

    @property
    def log(self) -> Path:
        """What the service did."""
        return self.path / "service.log"

    @property
    def stderr(self) -> Path:
        """The last words of a service in the background."""
        return self.path / "stderr.log"

    @property
    def _process_json(self) -> Path:
        return self.path / "service.json"

    @property
    def _credentials_json(self) -> Path:
        return self.path / "credentials.json"

    @property
    def _lock(self) -> OwnerLock:
        return OwnerLock(self.path / "owner.lock")

    def make(self) -> None:
        """See that the folder is there, belongs to this, and is closed to others.

        Raises:
            FolderUnusable.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # An experiment that asks for the storage here may have made it before the first start.
            entries = {entry.name for entry in self.path.iterdir()} - {self.storage.name}
            if entries and self._lock.path.name not in entries:
                raise FolderUnusable(
                    f"cannot use {self.path} as state directory: it holds something else, such as {min(entries)}; "
                    "name a new or an empty folder with --state-dir"
                )
            self.path.chmod(0o700)
            self._lock.path.touch(mode=0o600)  # from here on it is known as ours
        except OSError as error:
            raise FolderUnusable(
                f"cannot use {self.path} as state directory: {error.strerror}; name another with --state-dir"
            ) from error

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Own the folder: one service at a time.

        Raises:
            ServiceRuns: another one does.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._lock.owned())
            except BlockingIOError as error:
                raise ServiceRuns(
                    f"cannot start the local OpenPAI in {self.path}: it runs already; `nnictl openpai status` shows where"
                ) from error
            yield

    def is_owned(self) -> bool:
        """Whether a service has the folder now, or is just beginning or ending."""
        return self._lock.is_owned()

    def process(self) -> ServiceProcess | None:
        """The process that serves, or the last one that did; None before the first was ready."""
        return _read(
            self._process_json,
            lambda document: ServiceProcess(
                **{**document, "options": Options.from_json(document["options"])}
            ),
        )

    def write_process(self, process: ServiceProcess) -> None:
        """Let others know who serves now."""
        replace_file(self._process_json, json.dumps(asdict(process)).encode(), 0o600, is_durable=True)

    def credentials(self) -> Credentials | None:
        """How the owner enters; None before the first service."""
        return _read(self._credentials_json, lambda document: Credentials(**document))

    def write_credentials(self, credentials: Credentials) -> None:
        """Keep how the owner enters, for the owner alone."""
        replace_file(self._credentials_json, json.dumps(asdict(credentials)).encode(), 0o600, is_durable=True)


def _read(path: Path, make: Callable[[dict[str, Any]], T]) -> T | None:
    try:
        return make(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FolderUnusable(
            f"cannot read {path}: {error}; end the service if it runs, remove this file, and start it again"
        ) from error


# ---- whether it runs


def running(state: StateFolder) -> Service | None:
    """The service that runs there and answers; None if there is none.

    Raises:
        FolderUnusable: nobody can tell.
    """
    if not _is_owned(state):
        return None
    process, credentials = state.process(), state.credentials()
    if process is None or credentials is None:
        return None  # it is just beginning
    service = Service(state, process, credentials)
    return service if _answers(service) else None


def _is_owned(state: StateFolder) -> bool:
    try:
        return state.is_owned()
    except OSError as error:
        raise FolderUnusable(
            f"cannot look into {state.path}: {error.strerror}; name another with --state-dir"
        ) from error


def _answers(service: Service) -> bool:
    """Whether this process, and no other that has its port by now, answers there."""
    connection = OwnConnection(service.process.host, service.process.options.port, timeout=_ANSWERS_WITHIN_S)
    try:
        connection.request(
            "GET", "/api/v2/tokens/check", headers={"Authorization": f"Bearer {service.credentials.token}"}
        )
        answer = connection.getresponse()
        return answer.status == 200 and bool(json.loads(answer.read()))
    except (OSError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()


# ---- begin and end


def last_options(state: StateFolder) -> Options:
    """What the service was started with the last time."""
    last = state.process()
    return last.options if last else Options()


def start(state: StateFolder, options: Options | None = None) -> Service:
    """A service in the background, once it answers; without options it is as it was the last time.

    Where somebody else starts one there at the same moment, it is that one.

    Raises:
        ServiceFailed: it could not be started; nothing of it is left running.
        FolderUnusable: its folder cannot be used.
    """
    state.make()
    options = options or last_options(state)
    arguments = ["-m", "nni_manager.local_openpai", f"--state-dir={state.path}", *options.to_arguments()]
    child: subprocess.Popen[bytes] | None = None
    try:
        with state.stderr.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, *arguments],
                # Python looks for modules where it is started: not among the user's files.
                cwd=state.path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        service = _wait_until_ready(state, child)
    except BaseException:
        if child is not None:
            _end_half_started(child)
        raise
    open_files.give_back(child.pid)  # the manager, too, may start it
    _started.append(child)
    return service


def _wait_until_ready(state: StateFolder, child: subprocess.Popen[bytes]) -> Service:
    gives_up_at_s = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < gives_up_at_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_S)
            other = running(state)
            if other is not None:
                return other
            if not state.is_owned():
                raise ServiceFailed(_last_words(state.stderr, child.returncode))
            # Somebody else was quicker, and is not ready yet.
            time.sleep(_POLL_S)
            continue
        process = state.process()
        if process is not None and process.pid == child.pid:
            service = running(state)
            if service is not None:
                return service
    raise ServiceFailed(
        f"cannot start the local OpenPAI in {state.path}: it was not ready within {_READY_WITHIN_S:.0f} s; "
        f"free this machine of other work and try again, or look into {state.log}"
    )


def _last_words(stderr: Path, exit_code: int) -> str:
    lines = stderr.read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it said nothing"
    if last.startswith("cannot"):
        return last
    return (
        f"cannot start the local OpenPAI: it ended with exit code {exit_code}: {last}; "
        f"see {stderr}, and report it if it fails again"
    )


def _end_half_started(child: subprocess.Popen[bytes]) -> None:
    for end in (child.terminate, child.kill):
        if child.poll() is None:
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_ENDED_WITHIN_S)


def stop(state: StateFolder) -> ServiceProcess | None:
    """End the service; the process that it was, None where none ran. Tasks go on, and the next service finds them.

    Raises:
        ServiceStuck: it does not end, or does not get so far as to be told to.
        FolderUnusable: nobody can tell whether it runs.
    """
    gives_up_at_s = time.monotonic() + _READY_WITHIN_S
    while True:
        if not _is_owned(state):
            return None
        process = state.process()
        descriptor = None if process is None else _descriptor_of(process)
        if process is not None and descriptor is not None:
            break
        if time.monotonic() > gives_up_at_s:
            raise ServiceStuck(
                f"cannot end the local OpenPAI in {state.path}: it has not begun to answer; "
                f"see {state.log}, and try again"
            )
        time.sleep(_POLL_S)  # it is just beginning, or ending
    has_ended = terminate(descriptor, _ENDED_WITHIN_S)
    _started[:] = [child for child in _started if child.poll() is None]
    if not has_ended:
        raise ServiceStuck(
            f"cannot end the local OpenPAI in {state.path}: process {process.pid} ignores SIGTERM; "
            f"end it with `kill -9 {process.pid}`: nothing stored is lost"
        )
    return process


def _descriptor_of(process: ServiceProcess) -> int | None:
    """A descriptor of the process, None if it has ended: its number may be another's by now."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if ProcessIdentity(process.pid, process.start_ticks, process.boot_id).is_alive:
        return descriptor
    os.close(descriptor)
    return None
