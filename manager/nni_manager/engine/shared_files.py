"""Reads and writes the workspace where keepers access it: on mounted storage, or on a share.

Only this module of the engine uses shares; `trial_files` works on files of this machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nni_manager.domain.trial import Trial
from nni_manager.engine import trial_files
from nni_manager.engine.trial_files import AttemptReadout, FoundAttempts, Signer
from nni_manager.training_services.base import Placement
from nni_manager.training_services.share import Share
from trial_keeper.wire.messages import AttemptKey, Offsets, StopTrial, Stream
from trial_keeper.wire.workspace import ManagerDocument, Workspace

_FETCHED_BYTES = 2**20


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

    def write_experiment(
        self, document: ManagerDocument, run_script: str, code_snapshot: str | None = None
    ) -> None:
        """Write the files that every job needs, manager.json last: a keeper that can read it finds the others."""
        trial_files.write_experiment(self.workspace, document, run_script)
        workspace = self.workspace
        sdk = sorted((workspace.sdk / "nni_sdk").glob("*.py"))
        if self.share is not None and code_snapshot is not None:
            self.share.send(workspace.file(code_snapshot), is_fixed=True)
        folders = filter(Path.is_dir, (workspace.trials, workspace.checkpoints))
        self._send(*folders, *sdk, workspace.run_sh, workspace.manager_json)

    def write_trial(
        self, trial: Trial, command: str, placement: Placement, code_snapshot: str | None
    ) -> None:
        """Write the files that the job of one trial needs."""
        trial_files.write_trial(
            self.workspace, trial, command, placement, code_snapshot, is_private=self.is_private
        )
        folder = self.workspace.trial(trial.trial_id)
        self._send(folder.attempts, folder.parameter_cfg, folder.trial_json)

    def write_stop(self, stop: StopTrial) -> None:
        """Write a stop request for the unconnected keepers of a trial."""
        trial_files.write_stop(self.workspace, stop)
        self._send(self.workspace.trial(stop.trial_id).stop_json)

    def find_attempts(self, trial_id: str, signer: Signer) -> FoundAttempts:
        """The attempts of a trial; see `trial_files.find_attempts`."""
        folders_in, read = (None, None) if self.share is None else (self.share.folders_in, self.share.read)
        return trial_files.find_attempts(self.workspace, trial_id, signer, folders_in=folders_in, read=read)

    def see_attempt(
        self, key: AttemptKey, offsets: Offsets, signer: Signer, *, is_over: bool = False
    ) -> AttemptReadout:
        """Read an attempt's files; see `trial_files.see_attempt`."""
        read = None if self.share is None else self.share.read
        return trial_files.see_attempt(self.workspace, key, offsets, signer, is_over=is_over, read=read)

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
                with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
                    size += os.pwrite(file.fileno(), data, size)

    def _send(self, *paths: Path) -> None:
        if self.share is not None:
            for path in paths:
                self.share.send(path)
