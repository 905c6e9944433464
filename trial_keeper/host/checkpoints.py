"""Signs the checkpoints that a trial saves, and verifies those from which a new attempt may continue."""

import os

from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.checkpoints import (
    MAX_CHECKPOINTS,
    MAX_CHECKPOINTS_BYTES,
    MAX_MANIFEST_BYTES,
    Checkpoint,
    Manifest,
    checkpoints_from_bytes,
    checkpoints_to_bytes,
    newest_first,
    sources_to_bytes,
)
from trial_keeper.wire.documents import TrialDocument
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.safe_open import read_beneath
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.workspace import AttemptFolder, Workspace

_SUFFIX = ".json"


class CheckpointSigner:
    """Signs the new checkpoints of one attempt."""

    def __init__(self, settings: KeeperSettings, key: AttemptKey, folder: AttemptFolder) -> None:
        self._settings = settings
        self._key = key
        self._folder = folder
        self._signed: dict[str, Manifest] = {}
        self._problem = ""

    def problem(self) -> str:
        """Sign the new checkpoints. Returns why that fails; empty if it succeeds, or fails as in the previous call."""
        before, self._problem = self._problem, ""
        try:
            self.sign_new()
        except OSError as error:
            self._problem = str(error)
        return "" if self._problem == before else self._problem

    def sign_new(self) -> list[str]:
        """Sign the checkpoints that were saved since the last call. Returns their names, and removes those of removed ones.

        A manifest that cannot be read is skipped: the trial may be killed, or replace it.

        Raises:
            OSError: the storage cannot be read or written; the next call repeats the work.
        """
        try:
            # A folder of a few entries; its time of change is too coarse to detect each new one.
            names = os.listdir(self._folder.checkpoints)
        except (FileNotFoundError, NotADirectoryError):  # of most trials: they save no checkpoints
            return []
        manifests = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        found = sorted(manifests, key=_age)[-MAX_CHECKPOINTS:]
        kept = {name: self._signed[name] for name in found if name in self._signed}
        new = {}
        for name in found:
            if name not in kept and (manifest := self._read(name)) is not None:
                new[name] = manifest
        if not new and len(kept) == len(self._signed):
            return []
        signed = {name: (kept | new)[name] for name in found if name in kept or name in new}
        settings = self._settings
        content = checkpoints_to_bytes(
            settings.experiment_id, settings.job_id, self._key, signed.values(), settings.token
        )
        replace_file(self._folder.checkpoints_json, content)
        self._signed = signed
        return list(new)

    def _read(self, name: str) -> Manifest | None:
        path = self._folder.checkpoints / f"{name}{_SUFFIX}"
        try:
            content = read_beneath(self._folder.path, path, MAX_MANIFEST_BYTES)
            # Another user may be able to write there if the trial has opened its folder.
            if content.uid != os.stat(self._folder.path).st_uid:
                return None
            manifest = Manifest.from_bytes(content.data)
        except (OSError, DocumentInvalid):
            return None
        return manifest if manifest.name == name else None


def _age(name: str) -> int:
    return int(name) if name.isascii() and name.isdigit() else -1


def offer_checkpoints(
    workspace: Workspace, settings: KeeperSettings, trial: TrialDocument, key: AttemptKey
) -> tuple[list[Checkpoint], list[str]]:
    """Verify the checkpoints from which the attempt may continue, and name them in its folder, newest first.

    Returns them, and a message for each refused document. Checkpoints of earlier jobs are those in trial.json, which the manager
    has verified.

    Raises:
        OSError: they cannot be named in the attempt's folder.
    """
    found, refusals = list(trial.checkpoints), []
    for earlier in _earlier_attempts(workspace, key):
        folder = workspace.attempt(earlier)
        try:
            content = read_beneath(
                workspace.root, folder.checkpoints_json, MAX_CHECKPOINTS_BYTES, owned_as=folder.path
            )
            found += checkpoints_from_bytes(
                content.data,
                settings.experiment_id,
                earlier,
                lambda job_id: settings.token if job_id == settings.job_id else None,
            )
        except (FileNotFoundError, PermissionError):
            continue
        except (OSError, DocumentInvalid) as error:
            refusals.append(f"refused the checkpoints in {folder.path}: {error}")
    sources = newest_first(found, key.trial_id, key.task)
    if sources:
        named = [(each, str(workspace.attempt(each.key).checkpoints)) for each in sources]
        replace_file(workspace.attempt(key).checkpoint_sources_json, sources_to_bytes(named))
    return sources, refusals


def _earlier_attempts(workspace: Workspace, key: AttemptKey) -> list[AttemptKey]:
    try:
        return [each for each in workspace.attempts_of(key.trial_id) if each != key]
    except OSError:  # the keeper has just written there: another user's folders cannot be read
        return []
