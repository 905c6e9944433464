"""Checkpoints that survive attempts: `nni.save_checkpoint()`, `nni.load_checkpoint()` and `nni.checkpoint_dir()`.

Each attempt saves in its own folder, so no two attempts ever write at the same place. A checkpoint is complete when its manifest
is renamed into place:

    $NNI_SYS_DIR/checkpoints/000003/        its files
    $NNI_SYS_DIR/checkpoints/000003.json    its manifest, with the digest of the files
    $NNI_SYS_DIR/checkpoints.json           the manifests that the keeper has signed, newest last
    $NNI_SYS_DIR/checkpoint_sources.json    the signed checkpoints of earlier attempts, newest first, that the keeper has verified

A record of type CHECKPOINT, the mark, is appended to the metrics before the manifest. After `load_checkpoint`, a record of type
CONTINUED precedes the next report: it names the attempt and the checkpoint from which this process continues. So the manager can
join the results of both attempts at the mark, and each step's result counts once.

Imported on first use: training code without checkpoints pays nothing.
"""

import json
import os
import shutil
from contextlib import suppress
from itertools import count

from nni_sdk import trial as _trial_module
from nni_sdk.errors import CheckpointInvalid, CheckpointNotSaved, CheckpointTooLarge

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from nni_sdk.trial import TrialContext

MAX_CHECKPOINT_BYTES = 10 << 30
"""The default limit of one checkpoint. A larger one is more often an error (a data set, a whole folder) than a model."""

# Only bits that let other users write: what they change after the verification would be loaded.
_OTHERS_WRITE = 0o022
_READ_BYTES = 1 << 20
_standalone_folder = None  # type: str | None


def checkpoint_dir() -> str:
    """Return a folder of this trial for files of your own; all attempts of the trial have the same one, also on clusters.

    `save_checkpoint` does not use it. Nothing verifies its content: where other users run jobs on the shared storage, load
    nothing from it that could run code. Outside an experiment: a new temporary folder.

    Raises:
        EnvironmentIncomplete: a variable that every trial has is missing.
    """
    context = _trial_module._trial
    return _temporary_folder() if context.is_standalone else context.variable("NNI_CHECKPOINT_DIR")


def save_checkpoint(
    source: "str | os.PathLike[str] | Callable[[str], object]",
    keep: int = 2,
    max_bytes: int = MAX_CHECKPOINT_BYTES,
) -> str:
    """Save a checkpoint of this trial: all of it or nothing, whatever happens meanwhile. Returns its path.

    `source`: the path of a file or a folder, which is copied, or a function that is called with the path of a new folder and
    writes the files there. `keep`: how many of the newest checkpoints of this trial stay. `max_bytes`: the limit of this one.

    When it returns, the files are on disk, but a later attempt may load them only once the keeper has signed them, which takes it
    at most a second. Call it after the report of the step that the checkpoint contains, in the process that reports.

    Raises:
        CheckpointTooLarge: the checkpoint has more than `max_bytes`. Nothing was saved.
        CheckpointInvalid: the source is something else, or the checkpoint contains a link, a pipe or the like. Nothing was saved.
        CheckpointNotSaved: the storage is full or read-only, or the source cannot be read. Nothing was saved.
        ParametersMissing, EnvironmentIncomplete, MetricNotWritten: as `report_intermediate_result`.
    """
    if keep < 1:
        raise ValueError(f"cannot keep {keep!r} checkpoints; keep at least 1")
    context = _trial_module._trial
    folder = os.path.join(_attempt_folder(context), "checkpoints")
    new = ""
    try:
        os.makedirs(folder, 0o755, exist_ok=True)
        number = 1 + max([int(name) for name in _names_in(folder)] or [0])
        new = os.path.join(folder, f".new-{os.urandom(8).hex()}")  # threads may save at the same time
        # Closed until its digest is known: with a umask of 0 other users could change what is signed.
        os.mkdir(new, 0o700)
    except OSError as error:
        _not_saved(folder, error)
    try:
        entry = _fill(source, new)
        try:
            digest, size = _digest(new, max_bytes=max_bytes, is_new=True)
            os.chmod(new, os.stat(folder).st_mode & 0o777)
            name = _named(new, folder, number)
        except OSError as error:
            _not_saved(folder, error)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    path = os.path.join(folder, name)
    manifest = {
        "name": name,
        "entry": entry,
        "digest": digest,
        "bytes": size,
        "reports": _reports_of(context),
    }
    is_marked = False
    try:
        if not context.is_standalone:
            context.append_mark("CHECKPOINT", json.dumps(name))
            is_marked = True
        try:
            _replace(path + ".json", manifest)
        except OSError as error:
            _not_saved(folder, error)
    except BaseException:
        _discard(path, is_marked)
        raise
    with suppress(OSError):  # the next save removes them
        _remove_old(context, folder, keep)
    return os.path.join(path, entry) if entry else path


def load_checkpoint() -> "str | None":
    """Return the path of the newest checkpoint of this trial: the file or the folder that was saved; None if there is none.

    An attempt that starts again finds what those before it have saved. A trial that continues another one finds that one's:
    in a population, in a bracket of Hyperband, and by `nnictl trial retry --from-checkpoint`. The results that were reported
    after the checkpoint was saved count no more: this process reports them again. Do not change the files.

    A checkpoint that no keeper of the experiment has signed, that belongs to another user or whose files have changed is refused,
    with a warning on stderr, and the one before it is returned.

    Raises:
        CheckpointInvalid: every checkpoint was refused, since its files have changed or belong to another user.
        ParametersMissing, EnvironmentIncomplete, MetricNotWritten: as `report_intermediate_result`.
    """
    context = _trial_module._trial
    attempt = _attempt_folder(context)
    refusals = []
    sources = _own(attempt) + _verified(attempt)
    for source in sources:
        path = os.path.join(source["folder"], source["name"])
        if not os.path.lexists(path):
            continue  # removed by a later save
        refusal = _refusal(path, source)
        if refusal:
            refusals.append(f"cannot use checkpoint {path}: {refusal}")
            _trial_module._log().warning("%s; trying the one before it", refusals[-1])
            continue
        _continue_from(context, source)
        return str(os.path.join(path, source["entry"]) if source["entry"] else path)
    if refusals:
        raise CheckpointInvalid(
            f"{refusals[0]}; check who writes to the storage. To start at the first step, remove its folder"
        )
    return None


# ---- the content of a checkpoint


def _fill(source: "Any", new: str) -> str:
    """Put the content into the new folder. Returns the name of the file there if the source is a file, else an empty text."""
    if callable(source):
        source(new)
        return ""
    try:
        path = os.fspath(source)
    except TypeError as error:
        raise CheckpointInvalid(
            f"cannot save a {type(source).__name__} as a checkpoint: it is neither a path nor a function; write it to a file and "
            "pass its path, or pass a function that is called with the path of a new folder and writes it there"
        ) from error
    try:
        if os.path.isdir(path):
            for name in os.listdir(path):
                inner, copy = os.path.join(path, name), os.path.join(new, name)
                if os.path.isdir(inner):
                    shutil.copytree(inner, copy)
                else:
                    shutil.copy2(inner, copy)
            return ""
        name = str(os.path.basename(path))
        shutil.copy2(path, os.path.join(new, name))
    except (OSError, shutil.Error) as error:
        _not_saved(path, error)
    return name


def _digest(folder: str, max_bytes: "int | None" = None, is_new: bool = False) -> "tuple[str, int]":
    """Return the SHA-256 of the names and the content of all files, and their size in bytes.

    `is_new`: sync each file to disk, and let no other user write to it.

    Raises:
        CheckpointInvalid: there is something else than files and folders.
        CheckpointTooLarge: the files have more than `max_bytes`.
    """
    import hashlib
    import stat

    total, digest = 0, hashlib.sha256()
    paths = []
    for place, folders, files in os.walk(folder):
        paths += [os.path.join(place, name) for name in folders + files]
    for path in [*sorted(paths), folder]:
        found = os.lstat(path)
        name = os.path.relpath(path, folder)
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise CheckpointInvalid(
                f"cannot save {name!r}: it is a link or a special file; save a copy of its content"
            )
        if is_new and found.st_mode & _OTHERS_WRITE:
            os.chmod(path, stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        total += size
        if max_bytes is not None and total > max_bytes:
            raise CheckpointTooLarge(
                f"cannot save a checkpoint of more than {max_bytes:,} bytes; save less, or raise the limit: "
                f"save_checkpoint(..., max_bytes={2 * max_bytes})"
            )
        digest.update(json.dumps([name, size, stat.S_ISDIR(found.st_mode)]).encode())
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(found.st_mode):
                while True:
                    piece = os.read(descriptor, _READ_BYTES)
                    if not piece:
                        break
                    digest.update(piece)
            if is_new:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return digest.hexdigest(), total


def _named(new: str, folder: str, number: int) -> str:
    """Rename the new folder to the next free number, and return the name. Another process may save at the same time."""
    while True:
        name = f"{number:06d}"
        if not os.path.lexists(os.path.join(folder, name)):
            try:
                os.rename(new, os.path.join(folder, name))
            except OSError:
                if not os.path.lexists(os.path.join(folder, name)):
                    raise
            else:
                return name
        number += 1


def _refusal(path: str, source: "dict[str, Any]") -> str:
    """Return why the checkpoint may not be loaded; empty if it may."""
    try:
        if os.lstat(path).st_uid != os.lstat(os.path.dirname(source["folder"])).st_uid:
            return "it belongs to another user than its attempt"
        digest, _ = _digest(path)
    except OSError as error:
        return f"cannot read it ({error.strerror})"
    except CheckpointInvalid:
        return "it contains a link or a special file"
    return "" if digest == source["digest"] else "its files have changed since they were saved"


# ---- checkpoints and their attempts


def _attempt_folder(context: "TrialContext") -> str:
    return _temporary_folder() if context.is_standalone else context.variable("NNI_SYS_DIR")


def _temporary_folder() -> str:
    global _standalone_folder  # noqa: PLW0603 - one for the process
    if _standalone_folder is None:
        import atexit
        import tempfile

        _standalone_folder = tempfile.mkdtemp(prefix="nni-checkpoints-")
        atexit.register(remove_own_folder, _standalone_folder, os.getpid())
    return _standalone_folder


def remove_own_folder(path: str, pid: int) -> None:
    """Remove a temporary folder of this process. A child of `fork`, which inherits the exit handler, leaves its parent's."""
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)


def _names_in(folder: str) -> "list[str]":
    """The names of complete content in a folder of checkpoints, oldest first."""
    return sorted((name for name in os.listdir(folder) if name.isdigit()), key=int)


def _read(path: str) -> "Any":
    """The content of a JSON file of this attempt; None if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def _own(attempt: str) -> "list[dict[str, Any]]":
    """The checkpoints that this attempt has saved, newest first: its processes may start again."""
    folder = os.path.join(attempt, "checkpoints")
    try:
        names = _names_in(folder)
    except OSError:
        return []
    manifests = [_read(os.path.join(folder, name + ".json")) for name in reversed(names)]
    origin = {
        "folder": folder,
        "trial_id": None,
        "attempt_id": os.path.basename(os.path.dirname(attempt)),
        "task": os.path.basename(attempt),
    }
    return [dict(manifest, **origin) for manifest in manifests if isinstance(manifest, dict)]


def _verified(attempt: str) -> "list[dict[str, Any]]":
    """The checkpoints of earlier attempts that the keeper has verified, newest first."""
    found = _read(os.path.join(attempt, "checkpoint_sources.json"))
    return found["checkpoints"] if isinstance(found, dict) else []


def _continue_from(context: "TrialContext", source: "dict[str, Any]") -> None:
    """Name the source in a record before the next report, and count the trial's reports from there."""
    if context.is_standalone:
        return
    import binascii

    own_id = context.variable("NNI_TRIAL_JOB_ID")
    if source["trial_id"] in (None, own_id):  # results of another trial are not this one's
        context.next_sequence = count(source["reports"]).__next__
    context.continues(
        json.dumps(
            {
                "trial_id": source["trial_id"] or own_id,
                "attempt_id": source["attempt_id"],
                "task": source["task"],
                "checkpoint": source["name"],
                # Processes that were forked after the load each write the record; it counts once.
                "load": binascii.hexlify(os.urandom(8)).decode(),
            }
        )
    )


def _reports_of(context: "TrialContext") -> int:
    """The number of intermediate results that this process has reported."""
    # The counter's own next() would use a number.
    text = repr(context.next_sequence.__self__)  # type: ignore[attr-defined]
    return int(text[text.index("(") + 1 : -1])


def _discard(path: str, is_marked: bool) -> None:
    """Free the space of a checkpoint whose manifest is missing. If it has a mark, its empty folder stays.

    A second mark with the same number would be ignored: the manager joins the results of attempts at the first one.
    """
    for name in (path + ".json", _partial(path + ".json")):
        with suppress(OSError):
            os.unlink(name)
    shutil.rmtree(path, ignore_errors=True)
    if is_marked:
        with suppress(OSError):
            os.mkdir(path)


def _remove_old(context: "TrialContext", folder: str, keep: int) -> None:
    """Remove all but the newest checkpoints of this trial, and never the newest one that a later attempt may load."""
    names = _names_in(folder)
    attempt = os.path.dirname(folder)
    signed = _read(os.path.join(attempt, "checkpoints.json"))
    safe = [each["name"] for each in signed["checkpoints"] if each["name"] in names] if signed else []
    for name in names[:-keep]:
        if name not in safe[-1:] and (safe or context.is_standalone):
            with suppress(OSError):
                os.unlink(os.path.join(folder, name + ".json"))
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    if len(names) < keep or not safe:
        return
    # Those of earlier attempts of this task are needed no more.
    attempt_id, task = os.path.split(attempt)
    attempts, own = os.path.split(attempt_id)
    for each in os.listdir(attempts):
        if each < own:
            shutil.rmtree(os.path.join(attempts, each, task, "checkpoints"), ignore_errors=True)


def _partial(path: str) -> str:
    return f"{path}.{os.getpid()}"


def _replace(path: str, content: object) -> None:
    """Write a JSON file that readers see complete or not at all, also after a power cut."""
    new = _partial(path)
    with open(new, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_saved(path: str, error: Exception) -> "NoReturn":
    reason = getattr(error, "strerror", None) or error
    raise CheckpointNotSaved(
        f"cannot save a checkpoint: {getattr(error, 'filename', None) or path}: {reason}; "
        "make it accessible, or free some space there"
    ) from error
