"""The workspace where keepers access it: the files that the manager writes for trials, and those that keepers leave.

Its storage is mounted on this machine, or behind an API; see `Share`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from collections.abc import Callable, Collection, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path

import nni_sdk
from nni_manager.domain.trial import Trial
from nni_manager.engine.serializers import parameters_view
from nni_manager.engine.tokens import token_of
from nni_manager.store.folders import WORLD_WRITABLE_STICKY
from nni_manager.support.keeper_bundle import KeeperBundle
from nni_manager.training_services.base import Placement
from nni_manager.training_services.share import Share
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.attempt_ids import is_attempt_id
from trial_keeper.wire.checkpoints import (
    MAX_CHECKPOINTS_BYTES,
    Checkpoint,
    checkpoints_from_bytes,
    newest_first,
)
from trial_keeper.wire.documents import (
    AttemptDocument,
    ManagerDocument,
    TrialDocument,
    exit_from_bytes,
    stop_to_bytes,
)
from trial_keeper.wire.messages import AttemptKey, Offsets, StopTrial, Stream, TrialEnded
from trial_keeper.wire.safe_open import OthersMayWrite, UnsafePath, open_beneath, read_beneath
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.workspace import MAX_ATTEMPT_JSON_BYTES, MAX_PACKAGES_BYTES, AttemptFolder, Workspace

log = logging.getLogger(__name__)

_READ_BYTES = 256 * 1024
_FETCHED_BYTES = 2**20
# A message of 4 KiB and a few numbers, with a margin.
_MAX_EXIT_BYTES = 64 * 1024
# Shared storage may show the last bytes late: twice the 3 s that NFS clients were seen to lag.
STORAGE_LAG_S = 6.0

Read = Callable[[Path, int, int], bytes]
"""Reads up to a number of bytes of a file from an offset; empty if the file does not exist or is not visible now."""


@dataclass(frozen=True, slots=True)
class AttemptReadout:
    """The state of one attempt as read from its files.

    `has_started`: its command runs, or has ended. `pieces`: bytes from the requested offsets on. `ended`: None until a complete
    exit.json is visible.
    """

    key: AttemptKey
    has_started: bool
    pieces: tuple[tuple[Stream, int, bytes], ...]
    ended: TrialEnded | None


@dataclass(frozen=True, slots=True)
class Signer:
    """The valid signer of a trial's attempts: the keepers of one job, which have its token.

    `token_of` returns the token of any job of the experiment. `unsigned_ids`: registered attempts of version 0.6, which signed
    nothing.
    """

    experiment_id: str
    job_id: str
    token_of: Callable[[str], str] = field(repr=False)
    unsigned_ids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class FoundAttempts:
    """The attempts of a trial that its job's keepers have signed, sorted by start, and the rejected ones."""

    keys: tuple[AttemptKey, ...]
    rejected: tuple[str, ...] = ()
    """A message for each directory that is ignored."""

    @property
    def newest(self) -> list[AttemptKey]:
        """The newest attempt of each task; empty if no keeper ever started one."""
        return list({key.task: key for key in self.keys}.values())


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """A workspace whose storage is mounted on this machine, or reached by calls to a `share`.

    With a share, files of the manager are also in the local workspace, and files of keepers only on the share. Every method may
    raise OSError, and with a share also `StorageUnavailable`.
    """

    workspace: Workspace
    share: Share | None = None
    is_private: bool = False
    """True if tasks run as the manager's own user: then no folder is open to other users."""

    # ---- files of the manager

    def write_experiment(
        self,
        document: ManagerDocument,
        run_script: str,
        code_snapshot: str | None = None,
        bundle: KeeperBundle | None = None,
    ) -> None:
        """Write the files that every job needs, manager.json last: a keeper that can read manager.json finds the others.

        Running trials of an earlier manager may read them at the same time.
        """
        workspace = self.workspace
        _write_sdk(workspace)
        if bundle is not None:
            self._write_bundle(bundle)
        replace_file(workspace.run_sh, run_script.encode())
        replace_file(workspace.manager_json, document.to_bytes())
        sdk = sorted(workspace.sdk.glob("**/*.py"))
        if self.share is not None and code_snapshot is not None:
            self.share.send(workspace.file(code_snapshot), is_fixed=True)
        if not workspace.packages.is_dir():
            _make_own(workspace.packages, {workspace.root.stat().st_uid, os.geteuid()})
        if not self.is_private:
            # Keepers of any user write there. The digest in a file's name shows whether its content is valid.
            workspace.packages.chmod(WORLD_WRITABLE_STICKY)
        folders = filter(
            Path.is_dir,
            (workspace.trials, workspace.packages, workspace.checkpoints, workspace.unpacked_keepers),
        )
        self._send(*folders, *sdk, workspace.run_sh, workspace.manager_json)

    def _write_bundle(self, bundle: KeeperBundle) -> None:
        """Write the archives that are missing; a file's name has the start of its digest."""
        workspace = self.workspace
        owners = {workspace.root.stat().st_uid, os.geteuid()}
        _make_own(workspace.keeper, owners)
        _make_own(workspace.unpacked_keepers, owners)
        workspace.unpacked_keepers.chmod(WORLD_WRITABLE_STICKY)
        for name in bundle.digests:
            source, copy = bundle.archive(name), workspace.keeper / bundle.stored_name(name)
            if not copy.is_file() or copy.stat().st_size != source.stat().st_size:
                replace_file(copy, source.read_bytes())
            if self.share is not None:
                self.share.send(copy, is_fixed=True)

    def write_trial(
        self,
        trial: Trial,
        command: str,
        placement: Placement,
        code_snapshot: str | None,
        seed: int | None = None,
        checkpoints: Sequence[Checkpoint] = (),
        result_metrics: tuple[str, ...] = (),
        keeps_stop: bool = False,
    ) -> None:
        """Write the files that the job of one trial needs; idempotent. Source for parameter.cfg: NNI v3.0 SDK.

        `checkpoints`: see `find_checkpoints`. `keeps_stop`: the stop request, if there is one, is of the current attempts.

        Raises:
            OSError: the storage cannot be written, or another user has created the trial's folder.
        """
        folder = self.workspace.trial(trial.trial_id)
        # The two uids differ if the storage server maps users.
        owners = {self.workspace.root.stat().st_uid, os.geteuid()}
        _make_own(folder.path, owners)
        _make_own(folder.attempts, owners)
        _make_own(folder.checkpoints, owners)
        if placement.code_dir is None and not self.is_private:
            # The container runs as another user, who creates the attempts' folders.
            folder.attempts.chmod(WORLD_WRITABLE_STICKY)
            folder.checkpoints.chmod(WORLD_WRITABLE_STICKY)
        replace_file(folder.parameter_cfg, json.dumps(parameters_view(trial)).encode())
        document = TrialDocument(
            trial.trial_id,
            trial.sequence_id,
            command,
            placement.code_dir or "",
            placement.gpu_indices,
            code_snapshot if placement.code_dir is None else None,
            seed,
            tuple(checkpoints),
            result_metrics,
        )
        if folder.stop_json.exists() and not keeps_stop:
            # It concerned an earlier attempt, whose other tasks had ended the trial. Keepers ignore an empty file.
            replace_file(folder.stop_json, b"")
            self._send(folder.stop_json)
        replace_file(folder.trial_json, document.to_bytes())
        self._send(folder.attempts, folder.checkpoints, folder.parameter_cfg, folder.trial_json)

    def has_folder_of_attempts(self, trial_id: str) -> bool:
        """False if the folder of a trial's attempts is gone, or something else is in its place."""
        try:
            return self.share is not None or stat.S_ISDIR(
                self.workspace.trial(trial_id).attempts.lstat().st_mode
            )
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the storage is stale or unmounted
            return True

    def write_stop(self, stop: StopTrial) -> None:
        """Write a stop request for the unconnected keepers of a trial, whose folder exists."""
        path = self.workspace.trial(stop.trial_id).stop_json
        replace_file(path, stop_to_bytes(stop))
        self._send(path)

    def _send(self, *paths: Path) -> None:
        if self.share is not None:
            for path in paths:
                self.share.send(path)

    # ---- files of keepers. A trial may have forged such files: a read must neither block nor leave the workspace.

    @property
    def _read(self) -> Read:
        return partial(_read, self.workspace) if self.share is None else self.share.read

    @property
    def _folders_in(self) -> Callable[[Path], list[str]] | None:
        return None if self.share is None else self.share.folders_in

    def find_attempts(self, trial_id: str, signer: Signer) -> FoundAttempts:
        """The attempts of a trial in the workspace.

        Raises:
            PermissionError: this user may read none of them.
        """
        keys, rejected = [], []
        closed: PermissionError | None = None
        for key in self.workspace.attempts_of(trial_id, self._folders_in):
            try:
                if self.share is None:
                    _check_access(self.workspace, key)
                why_not = _why_not_trusted(self.workspace, key, signer, self._read)
            except UnsafePath as error:
                why_not = f"cannot use {Path(error.filename).name}: {error.strerror}"
            except PermissionError as error:
                closed, why_not = error, f"cannot read {error.filename}: {error.strerror}"
            if why_not is None:
                keys.append(key)
            elif why_not:
                path = self.workspace.attempt(key).path
                rejected.append(f"ignored {path}: {why_not}; check who may write to the shared storage")
        if closed is not None and not keys:
            raise closed  # the unreadable attempt may be valid
        return FoundAttempts(tuple(keys), tuple(rejected))

    def signer_of_attempt(self, key: AttemptKey, signer: Signer) -> Signer | None:
        """The signer of an attempt of any job of the experiment; None: no keeper has signed it."""
        content = self._read(self.workspace.attempt(key).attempt_json, 0, MAX_ATTEMPT_JSON_BYTES)
        try:
            document = AttemptDocument.from_bytes(content, signer.token_of)
        except DocumentInvalid:
            return None
        is_named = (document.experiment_id, document.key) == (signer.experiment_id, key)
        return replace(signer, job_id=document.job_id) if is_named else None

    def find_checkpoints(self, trial: Trial, signer: Signer) -> list[Checkpoint]:
        """The signed checkpoints of the trial's earlier attempts, and of the trial that it continues; newest first."""
        found: list[Checkpoint] = []
        for trial_id in filter(None, (trial.trial_id, trial.continues)):
            try:
                keys = self.workspace.attempts_of(trial_id, self._folders_in)
            except PermissionError:
                continue
            for key in keys:
                try:
                    content = self._read(
                        self.workspace.attempt(key).checkpoints_json, 0, MAX_CHECKPOINTS_BYTES
                    )
                    if content:
                        found += checkpoints_from_bytes(content, signer.experiment_id, key, signer.token_of)
                except (DocumentInvalid, PermissionError) as error:
                    # Any user of the cluster may create such folders.
                    log.warning("trial %s: refused the checkpoints of attempt %s: %s", trial_id, key, error)
        return newest_first(found, trial.trial_id)

    def see_attempt(
        self, key: AttemptKey, offsets: Offsets, signer: Signer, *, has_ended: bool = False
    ) -> AttemptReadout:
        """Read an attempt's files from these offsets on, at most 256 KiB of each.

        Bytes beyond the sizes in exit.json are ignored. `has_ended`: nothing writes there any more, so zero bytes are data.
        """
        # Read exit.json before the streams: they then have all bytes within its sizes, or will show them later.
        read, folder = self._read, self.workspace.attempt(key)
        ended = _exit_of(key, read(folder.exit_json, 0, _MAX_EXIT_BYTES), signer)
        pieces = []
        for stream, offset in offsets.items():
            end = None if ended is None else ended.final_sizes.get(stream)
            longest = _READ_BYTES if end is None else min(_READ_BYTES, end - offset)
            data = read(folder.stream(stream), offset, longest) if longest > 0 else b""
            if ended is None and not has_ended:
                # NFS clients send written data in any order; missing parts are read as zeros.
                data = data.partition(b"\0")[0]
            if data:
                pieces.append((stream, offset, data))
        # A keeper writes its own stream once a command runs. If it was killed before that, there may be output of the command.
        has_started = bool(ended or pieces) or any(
            read(folder.stream(each), 0, 1) for each in (Stream.KEEPER, *Stream)
        )
        return AttemptReadout(key, has_started, tuple(pieces), ended)

    def read_packages(self, digest: str) -> bytes:
        """A list of packages that a keeper has written; empty if there is none. Its digest is to be checked."""
        path = self.workspace.packages / digest
        if self.share is not None:
            return self.share.read(path, 0, MAX_PACKAGES_BYTES)
        return read_beneath(self.workspace.root, path, MAX_PACKAGES_BYTES).data

    def fetch(self, trial_id: str, stream: Stream) -> None:
        """Copy the missing bytes of a stream from the share to the local files, for every attempt of a trial."""
        if self.share is None:
            return
        for key in self.workspace.attempts_of(trial_id, self.share.folders_in):
            path = self.workspace.attempt(key).stream(stream)
            size = path.stat().st_size if path.is_file() else 0
            # Bytes that have not arrived yet are read as zeros.
            while data := self.share.read(path, size, _FETCHED_BYTES).rstrip(b"\0"):
                path.parent.mkdir(parents=True, exist_ok=True)
                # Write at the offset instead of appending: another process may fetch the same bytes.
                descriptor = open_beneath(self.workspace.root, path, os.O_WRONLY | os.O_CREAT)
                with open(descriptor, "wb", buffering=0) as file:
                    size += os.pwrite(file.fileno(), data, size)


def _write_sdk(workspace: Workspace) -> None:
    """Write this manager's nni_sdk and nni for trials whose Python has none. Files with the same content are left unchanged."""
    own = Path(nni_sdk.__file__).parent
    for folder in (workspace.sdk, *workspace.sdk_packages):
        folder.mkdir(0o755, exist_ok=True)
    packages = zip((own, own / "fallback/nni", own / "integrations"), workspace.sdk_packages, strict=True)
    for source, copy in (
        (each, package / each.name) for origin, package in packages for each in origin.glob("*.py")
    ):
        content, found = source.read_bytes(), None
        with contextlib.suppress(FileNotFoundError, PermissionError, UnsafePath):
            found = read_beneath(workspace.root, copy, len(content)).data
        if found != content:
            replace_file(copy, content)


def _make_own(folder: Path, owners: Collection[int]) -> None:
    """Create a folder, unless it exists from an earlier try. In another user's folder, that user controls what jobs run."""
    try:
        folder.mkdir(0o755)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
            raise FileExistsError(
                errno.EEXIST, "another user has created it; remove it", str(folder)
            ) from None


def _check_access(workspace: Workspace, key: AttemptKey) -> None:
    """Check that the files on which a result depends are the keeper's own.

    Raises:
        UnsafePath: attempt.json is not a regular file of the directory's owner.
        OthersMayWrite: other users can write to attempt.json, to the metrics, or to a folder on the way.
    """
    folder = workspace.attempt(key)
    # A trial may replace its own metrics; then they are read no further.
    for path, refusal in (
        (folder.attempt_json, UnsafePath),
        (folder.stream(Stream.METRICS), OthersMayWrite),
    ):
        try:
            os.close(open_beneath(workspace.root, path, owned_as=folder.path))
        except OSError as error:
            if isinstance(error, refusal) or not _is_absent(error):
                raise


def _why_not_trusted(workspace: Workspace, key: AttemptKey, signer: Signer, read: Read) -> str | None:
    """The reason to reject an attempt's directory; None: a keeper of the job has signed it.

    Empty text: not reported, because the directory is still empty, or a keeper of an earlier job of the trial has signed it.
    """
    if not is_attempt_id(key.attempt_id):
        return None if key.attempt_id in signer.unsigned_ids else "it is not a registered attempt"
    folder = workspace.attempt(key)
    content = read(folder.attempt_json, 0, MAX_ATTEMPT_JSON_BYTES)
    if not content:
        is_used = read(folder.exit_json, 0, 1) or read(folder.stream(Stream.METRICS), 0, 1)
        return "it has no attempt.json, so what it has reported does not count" if is_used else ""
    try:
        document = AttemptDocument.from_bytes(content, signer.token_of)
    except DocumentInvalid as error:
        return str(error)
    if (document.experiment_id, document.key) != (signer.experiment_id, key):
        return "attempt.json names another attempt"
    return None if document.job_id == signer.job_id else ""


def is_signed(workspace: Workspace, key: AttemptKey, experiment_id: str, secret: bytes) -> bool:
    """True if a keeper of any job of the experiment has signed the attempt, and this user may read the signature.

    The storage must be mounted here.

    Raises:
        OSError: the storage cannot be read.
    """
    try:
        content = _read(workspace, workspace.attempt(key).attempt_json, 0, MAX_ATTEMPT_JSON_BYTES)
        document = AttemptDocument.from_bytes(content, partial(token_of, secret))
    except (PermissionError, DocumentInvalid):
        return False
    return (document.experiment_id, document.key) == (experiment_id, key)


def _exit_of(key: AttemptKey, content: bytes, signer: Signer) -> TrialEnded | None:
    token = signer.token_of(signer.job_id) if is_attempt_id(key.attempt_id) else None
    try:
        ended = exit_from_bytes(content, token) if content else None
    except DocumentInvalid:
        return None
    # Ignore an end that names another attempt.
    return ended if ended is not None and ended.key == key else None


def _read(workspace: Workspace, path: Path, offset: int, longest: int) -> bytes:
    attempt = AttemptFolder(workspace.attempt_folder_of(path))
    try:
        # A trial may open its output to others, on which no result depends.
        is_log = path.parent == attempt.output
        descriptor = open_beneath(workspace.root, path, owned_as=attempt.path, may_be_shared=is_log)
        try:
            return os.pread(descriptor, longest, offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        if _is_absent(error):
            return b""
        raise


def _is_absent(error: OSError) -> bool:
    """True if there is no such file, or none of the attempt's owner; ESTALE: it has just been replaced."""
    return isinstance(error, FileNotFoundError | UnsafePath) or error.errno == errno.ESTALE
