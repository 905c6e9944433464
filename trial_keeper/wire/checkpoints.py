"""Checkpoints of attempts as documents: what training code saves, what a keeper signs, and what a later attempt may load.

Training code describes a new checkpoint in a manifest in its attempt's folder (`nni_sdk.checkpoints`). Its keeper adds the
manifest to the attempt's signed checkpoints.json. Only what such a document names may be loaded: a keeper verifies the documents
of its own job's attempts, and the manager those of all other jobs, which it then names in trial.json.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.attempt_ids import sort_key
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.signatures import DocumentInvalid, check_signature, signed

MAX_MANIFEST_BYTES = 4096
"""The bound of a manifest: two names and a digest."""
MAX_CHECKPOINTS = 100
"""The most checkpoints of one attempt that are signed, the newest ones. Training code keeps two unless it asks for more."""
MAX_CHECKPOINTS_BYTES = MAX_MANIFEST_BYTES * (MAX_CHECKPOINTS + 1)
"""The bound of checkpoints.json."""
_MAX_SOURCES = 10
"""The most checkpoints that a trial is offered: those after the first matter only if the files of the first have changed."""
_KIND = "checkpoints.json"
# Also the limit of a file's name on Linux.
_MAX_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class Manifest:
    """One saved checkpoint, as training code describes it.

    `entry`: the one file in its folder that was saved; empty if the folder itself was. `digest`: see `nni_sdk.checkpoints`.
    `reports`: the number of intermediate results before it.
    """

    name: str
    entry: str
    digest: str
    reports: int

    @classmethod
    def from_bytes(cls, content: bytes) -> "Manifest":
        """Parse a manifest.

        Raises:
            DocumentInvalid: it is not one.
        """
        return _manifest(_parsed(content))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that a keeper of the experiment has signed, and its attempt."""

    trial_id: str
    attempt_id: str
    task: str
    name: str
    entry: str
    digest: str
    reports: int

    @property
    def key(self) -> AttemptKey:
        """The attempt that saved it."""
        return AttemptKey(self.trial_id, self.attempt_id, self.task)

    @classmethod
    def of(cls, key: AttemptKey, manifest: Manifest) -> "Checkpoint":
        """The checkpoint of an attempt."""
        return cls(key.trial_id, key.attempt_id, key.task, **asdict(manifest))


def checkpoints_to_bytes(
    experiment_id: str, job_id: str, key: AttemptKey, manifests: Iterable[Manifest], token: str
) -> bytes:
    """The content of checkpoints.json, signed with the job's token. `manifests`: oldest first."""
    document = {
        "experiment_id": experiment_id,
        "job_id": job_id,
        **asdict(key),
        "checkpoints": [asdict(manifest) for manifest in manifests],
    }
    return json.dumps(signed(_KIND, document, token)).encode()


def checkpoints_from_bytes(
    content: bytes, experiment_id: str, key: AttemptKey, token_of: Callable[[str], str | None]
) -> list[Checkpoint]:
    """Verify the checkpoints.json in the folder of the attempt `key`; returns its checkpoints, oldest first.

    `token_of` returns the token of a job by its id; None: another party verifies documents of that job, and none are returned.

    Raises:
        DocumentInvalid: it is not such a document, or names another attempt.
        SignatureInvalid: the signature does not match the token of the job that the document names.
    """
    document = _parsed(content)
    token = token_of(_text(document, "job_id"))
    if token is None:
        return []
    check_signature(_KIND, document, token)
    named = AttemptKey(*(_text(document, name) for name in ("trial_id", "attempt_id", "task")))
    if (_text(document, "experiment_id"), named) != (experiment_id, key):
        raise DocumentInvalid(f"{_KIND} names another attempt")
    found = document.get("checkpoints")
    if not isinstance(found, list):
        raise DocumentInvalid(f"cannot read {_KIND}: it has no list of checkpoints")
    return [Checkpoint.of(key, _manifest(each)) for each in found[-MAX_CHECKPOINTS:]]


def checkpoint_of(document: object) -> Checkpoint:
    """Parse a checkpoint in trial.json.

    Raises:
        DocumentInvalid: it is not one.
    """
    if not isinstance(document, dict):
        raise DocumentInvalid("a checkpoint is not a JSON object")
    key = AttemptKey(*(_text(document, name) for name in ("trial_id", "attempt_id", "task")))
    return Checkpoint.of(key, _manifest(document))


def newest_first(
    checkpoints: Iterable[Checkpoint], trial_id: str, task: str | None = None
) -> list[Checkpoint]:
    """The checkpoints that a trial may continue from, without duplicates, at most 10.

    Those of the trial itself precede those of the trial that it continues, and those of the task precede those of other tasks.
    Then later attempts come first, and later checkpoints of an attempt.
    """

    def rank(each: Checkpoint) -> tuple[bool, bool, tuple[int, str], int]:
        return each.trial_id == trial_id, each.task == task, sort_key(each.attempt_id), int(each.name)

    return sorted(set(checkpoints), key=rank, reverse=True)[:_MAX_SOURCES]


def sources_to_bytes(sources: Iterable[tuple[Checkpoint, str]]) -> bytes:
    """The content of checkpoint_sources.json: verified checkpoints, each with the path of its folder in the container."""
    return json.dumps(
        {"checkpoints": [{**asdict(each), "folder": folder} for each, folder in sources]}
    ).encode()


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DocumentInvalid(f"cannot read a checkpoint's document: it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise DocumentInvalid("cannot read a checkpoint's document: it is not a JSON object")
    return document


def _manifest(document: object) -> Manifest:
    if not isinstance(document, dict):
        raise DocumentInvalid("a checkpoint's manifest is not a JSON object")
    name, entry, digest = (_text(document, field) for field in ("name", "entry", "digest"))
    if not (name.isascii() and name.isdigit()) or "/" in entry or entry in (".", ".."):
        raise DocumentInvalid(f"cannot use {name!r} and {entry!r} as names in a checkpoint")
    reports = document.get("reports")
    if type(reports) is not int or not 0 <= reports < 2**63:
        raise DocumentInvalid("a checkpoint's number of reports is invalid")
    return Manifest(name, entry, digest, reports)


def _text(document: dict[str, Any], name: str) -> str:
    text = document.get(name)
    try:
        if type(text) is str and len(text.encode()) <= _MAX_NAME_BYTES and "\0" not in text:
            return text
    except UnicodeEncodeError:  # a lone surrogate
        pass
    raise DocumentInvalid(f"a checkpoint's {name} is missing or invalid")
