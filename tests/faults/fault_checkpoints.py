"""Pause a trial inside `save_checkpoint`, and check from which checkpoint an attempt continued.

The check relies on the keepers' signatures and the trials' own records. It uses nothing that the manager reports about
checkpoints.
"""

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from nni_manager.engine.tokens import token_of
from trial_keeper.wire.checkpoints import Checkpoint, checkpoints_from_bytes
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.workspace import AttemptFolder, Workspace


@dataclass(frozen=True, slots=True)
class Holds:
    """Files that make a trial wait at a point inside `save_checkpoint`: see fault_train.py. `folder` is on a disk without
    faults.
    """

    folder: Path

    def hold(self, trial_id: str, place: str) -> None:
        """Make the trial wait at the given point during its next checkpoint. If it waits at another point now, it continues."""
        self._arrival(trial_id, place).unlink(missing_ok=True)
        new = self.folder / f"{trial_id}.new"
        new.write_text(place)
        new.replace(self.folder / trial_id)

    def has_arrived(self, trial_id: str, place: str) -> bool:
        """Whether the trial waits at this point."""
        return self._arrival(trial_id, place).exists()

    def release(self, trial_id: str) -> None:
        """Let the trial continue. Unless it is released, the trial's next attempt waits too."""
        (self.folder / trial_id).unlink(missing_ok=True)

    def _arrival(self, trial_id: str, place: str) -> Path:
        return self.folder / f"{trial_id}.{place}"


def is_newest_signed(attempt: AttemptFolder) -> bool:
    """Whether the attempt's keeper has signed the newest checkpoint that has a manifest."""
    with contextlib.suppress(OSError, ValueError):
        newest = max(path.stem for path in attempt.checkpoints.glob("*.json"))
        signed = json.loads(attempt.checkpoints_json.read_bytes())["checkpoints"]
        return newest in [each["name"] for each in signed]
    return False


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint from which an attempt continued, as the trial's process recorded it. `values`: the content of the
    checkpoint.
    """

    attempt_id: str
    name: str
    values: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> "Loaded":
        attempt_id, name, *values = text.split()
        return cls(attempt_id, name, tuple(values))


@dataclass(frozen=True, slots=True)
class Continuation:
    """How one attempt started: from the checkpoint `loaded`, or without a checkpoint if `loaded` is None.

    `earlier`: the previous attempts of the trial. `reports_of` returns the reports of each run of an attempt.
    """

    storage: Workspace
    secret: bytes
    loaded: Loaded | None
    earlier: tuple[AttemptKey, ...]
    reports_of: Callable[[str], Iterable[list[str]]]

    def errors(self, *, is_newest_required: bool) -> list[str]:
        """The errors in how the attempt started; empty if it started from a correct checkpoint. `is_newest_required`: the attempt
        must start from the newest checkpoint, because no fault hides it.
        """
        signed = [each for key in self.earlier for each in self._signed(key)]
        newest = max(signed, key=lambda each: (each.attempt_id, int(each.name)), default=None)
        found = self.loaded and next((each for each in signed if _is_of(each, self.loaded)), None)
        if self.loaded is None:
            if newest is None or not is_newest_required:
                return []
            return [
                f"it started at its first step, and checkpoint {newest.name} of {newest.attempt_id} is signed"
            ]
        told = f"it continued from checkpoint {self.loaded.name} of {self.loaded.attempt_id}"
        if found is None:
            return [f"{told}, which no keeper has signed"]
        wrong = []
        if is_newest_required and found != newest:
            wrong.append(f"{told}, and {newest and newest.name} of {newest and newest.attempt_id} is newer")
        if found.reports != len(self.loaded.values):
            wrong.append(f"{told} with {len(self.loaded.values)} values, and {found.reports} are signed")
        expected = list(self.loaded.values)
        if not any(made[: len(expected)] == expected for made in self.reports_of(found.attempt_id)):
            wrong.append(f"{told}, and that attempt has not reported its {len(expected)} values")
        return wrong

    def _signed(self, key: AttemptKey) -> list[Checkpoint]:
        with contextlib.suppress(OSError, DocumentInvalid):
            return checkpoints_from_bytes(
                self.storage.attempt(key).checkpoints_json.read_bytes(),
                self.storage.root.name,
                key,
                lambda job_id: token_of(self.secret, job_id),
            )
        return []


def _is_of(signed: Checkpoint, loaded: Loaded) -> bool:
    return (signed.attempt_id, signed.name) == (loaded.attempt_id, loaded.name)
