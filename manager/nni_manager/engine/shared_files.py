"""The workspace where keepers see it, as the engine writes and reads it: the one place that knows of shares.

`trial_files` does it on files of this machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nni_manager.domain.trial import Trial
from nni_manager.engine import trial_files
from nni_manager.engine.trial_files import Seen
from nni_manager.training_services.base import Placement
from nni_manager.training_services.share import Share
from trial_keeper.wire.messages import AttemptKey, Offsets, StopTrial, Stream
from trial_keeper.wire.workspace import ManagerDocument, Workspace

_FETCHED_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """A workspace. This machine has its storage mounted, or a `share` to make calls to.

    With a share, what the manager writes lies in the workspace here as well, and what keepers write lies there alone. Every
    method may raise `ShareAway` then, and an OSError in any case.
    """

    workspace: Workspace
    share: Share | None = None

    def write_experiment(
        self, document: ManagerDocument, run_script: str, code_snapshot: str | None = None
    ) -> None:
        """What every job needs. Whoever reads manager.json finds the rest."""
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
        """What the job of one trial needs."""
        trial_files.write_trial(self.workspace, trial, command, placement, code_snapshot)
        folder = self.workspace.trial(trial.trial_id)
        self._send(folder.attempts, folder.parameter_cfg, folder.trial_json)

    def write_stop(self, stop: StopTrial) -> None:
        """Ask the keepers of a trial that no stream reaches to stop it."""
        trial_files.write_stop(self.workspace, stop)
        self._send(self.workspace.trial(stop.trial_id).stop_json)

    def newest_attempts(self, trial_id: str) -> list[AttemptKey]:
        """The newest attempt of each task of a trial; empty when no keeper ever began one."""
        folders_in = None if self.share is None else self.share.folders_in
        return trial_files.newest_attempts(self.workspace, trial_id, folders_in)

    def see_attempt(self, key: AttemptKey, offsets: Offsets, *, is_over: bool = False) -> Seen:
        """Look at an attempt's files: see the function of this name."""
        read = None if self.share is None else self.share.read
        return trial_files.see_attempt(self.workspace, key, offsets, is_over=is_over, read=read)

    def fetch(self, trial_id: str, stream: Stream) -> None:
        """Bring what a share has of a stream here, for those who read files: of every attempt, what is not here yet."""
        if self.share is None:
            return
        for key in self.workspace.attempts_of(trial_id, self.share.folders_in):
            path = self.workspace.attempt(key).stream(stream)
            size = path.stat().st_size if path.is_file() else 0
            # What has not come yet is read as zeros.
            while data := self.share.read(path, size, _FETCHED_BYTES).rstrip(b"\0"):
                path.parent.mkdir(parents=True, exist_ok=True)
                # At its own place, and not at the end: another process may fetch the same.
                with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
                    size += os.pwrite(file.fileno(), data, size)

    def _send(self, *paths: Path) -> None:
        if self.share is not None:
            for path in paths:
                self.share.send(path)
