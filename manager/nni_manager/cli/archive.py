"""Archives of experiments: `save` writes an experiment to one file, `load` restores it on another machine.

    manifest.json           the format, the experiment's id, and the version that wrote it
    experiment.sqlite       the store, without the experiment's secret and without logins
    log/                    logs of the manager, and collected logs of trials
    code/                   code that trials run, generated from annotated code
    code-with-annotations/  the files that differ from it, as the user wrote them
    trials/                 output of trials in the workspace
    checkpoints/            checkpoints that a population of trials resumes from
    code.tar.gz             the code folder, if requested

An archive holds regular files and folders only; other file types that a trial created are left out. `load` treats an archive
as untrusted: members that lead out of the folder, or run when they are read, are refused or left out.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import secrets
import shutil
import stat
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nni_manager.cli.archive_reader import LIMITS, NO_LIMITS, ArchiveLimits, unpack_code, unpack_experiment
from nni_manager.client.stored import StoredDocuments
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.model import ExperimentSpec
from nni_manager.engine.code_snapshot import take_snapshot
from nni_manager.errors import InternalError, UserError
from nni_manager.store.copying import copy_store
from nni_manager.store.errors import TableMissing
from nni_manager.store.folders import ExperimentExists, ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry
from nni_manager.store.torn_files import NOT_WHOLE
from nni_manager.store.untrusted_store import copy_tables
from nni_manager.support.plain_text import escaped
from nni_manager.training_services.platform import Locations, platform_of
from nni_manager.tuner.untrusted_metadata import strip_pickles
from trial_keeper import __version__
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.safe_open import UnsafePath, is_safe_name, open_beneath
from trial_keeper.wire.workspace import Workspace

_FORMAT = 1
_MANIFEST, _STORE, _CODE = "manifest.json", "experiment.sqlite", "code.tar.gz"
# Folders of the workspace.
_TRIALS = "trials"
_WORKSPACE = (_TRIALS, "checkpoints")
# Subfolders of the experiment's folder. Left out: keys, process records, and local jobs, which exist on one machine only; and
# the state of a custom tuner and a function that trials run, which may be pickles and must not be loaded from an archive.
_FOLDERS = ("log", "code", "code-with-annotations")
# Keys of the config, at any depth, whose path may lie in the code folder.
_IN_CODE = ("code_dir", "config_path", "job_file", "ca_file")
# Depth of an attempt's folder below `trials`, and its folders that are left out: the code has its own member, and no keeper of
# another secret accepts the signatures of checkpoints, which may be pickles.
_ATTEMPT_DEPTH = 4
_NOT_OF_ATTEMPTS = ("code", "checkpoints")
# A manifest has three short fields.
_MAX_MANIFEST_BYTES = 4096
# Linux refuses longer arguments (MAX_ARG_STRLEN), so no experiment has a longer command.
_MAX_COMMAND_BYTES = 128 * 1024
# Length of the text that a message quotes from an archive.
_MAX_REASON_CHARACTERS = 1000

_UNPACK_ERRORS = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError)


# ---- save


def save(folder: ExperimentFolder, target: Path, *, has_code: bool) -> list[str]:
    """Write the archive, and return warnings for the user. No manager may own the experiment meanwhile.

    Raises:
        UserError: the experiment is not terminal, or its code cannot be packed.
        OSError: the archive cannot be written.
    """
    if not target.parent.is_dir():
        raise UserError(
            f"cannot write {target}: there is no folder {target.parent}; create it, or name another"
        )
    config = StoredDocuments(folder).config()
    warnings, left_out = [], 0
    cluster = config.cluster
    if cluster.has_unmounted_share:
        warnings.append(f"{target} does not contain the files of trials on the share; copy them from there")
    if cluster.has_job_file:
        warnings.append(f"{target} contains the job file of the experiment, with any secrets in it")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        part = Path(temporary)
        # A loaded experiment must not run the commands of `notify`, or send to its addresses.
        public = config.replace(cluster=cluster.without_login(), notify=[])
        copy_store(folder.database, part / _STORE, config=public.to_json(), secret=b"")
        manifest = {"format": _FORMAT, "experimentId": folder.experiment_id, "version": __version__}
        (part / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if has_code and not config.is_annotated and config.code_dir != folder.objective:
            storage = platform_of(config).storage_here()
            excluded = (config.log_dir,) if storage is None else (config.log_dir, storage)
            snapshot = take_snapshot(config.code_dir, Workspace(part), config.secret_files, excluded)
            os.rename(part / snapshot.name, part / _CODE)
        # 0600, as private as the experiment's folder.
        with open(os.open(part / "archive", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
                for name in (_MANIFEST, _STORE, _CODE):
                    if (part / name).exists():
                        _add_file(archive, name, part / name, part)
                for name in _FOLDERS:
                    left_out += _add_tree(archive, name, folder.path / name)
                for name in _WORKSPACE:
                    left_out += _add_tree(archive, name, folder.workspace.root / name)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part / "archive", target)
    if config.objective:
        warnings.append(f"{target} does not contain the function {config.objective}, which trials run")
    if left_out:
        warnings.append(f"{target} does not contain {left_out} links, pipes or unreadable files of trials")
    return warnings


def _add_file(archive: tarfile.TarFile, name: str, path: Path, root: Path) -> None:
    with open(open_beneath(root, path), "rb") as file:
        status = os.fstat(file.fileno())
        member = tarfile.TarInfo(name)
        member.size, member.mtime = status.st_size, int(status.st_mtime)
        member.mode = 0o700 if status.st_mode & stat.S_IXUSR else 0o600
        archive.addfile(member, file)


def _add_tree(archive: tarfile.TarFile, name: str, root: Path) -> int:
    """Add a folder if it exists; return how many entries were left out (no file or folder, or unreadable)."""
    if not root.is_dir():
        return 0
    left_out = 0
    for above, folders, files in os.walk(root):
        here = Path(above).relative_to(root)
        if name == _TRIALS and len(here.parts) == _ATTEMPT_DEPTH:
            folders[:] = [each for each in folders if each not in _NOT_OF_ATTEMPTS]
        folders.sort()
        left_out += sum((Path(above) / each).is_symlink() for each in folders)
        member = tarfile.TarInfo(str(Path(name) / here))
        member.type, member.mode = tarfile.DIRTYPE, 0o700
        archive.addfile(member)
        for each in sorted(files):
            try:
                _add_file(archive, str(Path(name) / here / each), Path(above) / each, root)
            except (UnsafePath, PermissionError):
                left_out += 1
    return left_out


# ---- load


@dataclass(frozen=True, slots=True)
class LoadedExperiment:
    """An experiment from an archive. `has_its_code`: False if the code folder was not empty, so the code was left out."""

    folder: ExperimentFolder
    config: ExperimentSpec
    has_its_code: bool


def load(path: Path, locations: Locations, limits: ArchiveLimits = LIMITS) -> LoadedExperiment:
    """Create an experiment from the archive. Nothing runs, and no manager owns it.

    A failure leaves nothing behind.

    Raises:
        UserError: the file is not an archive that `save` wrote, or the experiment exists already or lacks something.
        UserError, StoreTooLarge: the archive exceeds the limits for untrusted archives.
    """
    locations.log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=locations.log_dir, prefix=".loading-") as temporary:
        part = Path(temporary)
        with _as_archive_unusable(path):
            unpack_experiment(path, part, {_MANIFEST, _STORE, _CODE}, {*_FOLDERS, *_WORKSPACE}, limits)
            for needed in (_MANIFEST, _STORE):
                if not (part / needed).is_file():
                    raise ValueError(f"it contains no {needed}")
            name = _id_of(part / _MANIFEST)
            store = part / "tables.sqlite"
            copy_tables(part / _STORE, store, is_bounded=limits != NO_LIMITS)
            with StoreReader(store) as reader:
                stored = reader.experiment()
                if stored.experiment_id != name:
                    raise ValueError(
                        f"its manifest names experiment {name!r}, and its database {stored.experiment_id!r}"
                    )
                config = ExperimentSpec.from_json(stored.config)
            size = len((config.trial_command or "").encode(errors="surrogatepass"))
            if size > _MAX_COMMAND_BYTES:
                raise ValueError(f"its command has {size} bytes; shells accept at most {_MAX_COMMAND_BYTES}")
        folder = ExperimentFolder(locations.log_dir / name)
        known = {each.experiment_id for each in Registry.of_user().all() if each.path.exists()}
        if name in known or folder.path.exists():
            raise _exists(path, name)
        config = _placed(config, folder, locations, path, has_code=(part / _CODE).exists())
        storage = platform_of(config).storage_here()
        try:
            folder.make(storage)
            with _as_archive_unusable(path):
                copy_store(
                    store,
                    folder.database,
                    config=config.to_json(),
                    secret=secrets.token_bytes(32),
                    metadata_of=strip_pickles,
                )
            has_its_code = _fill(folder, config, part, limits, path)
            Registry.of_user().add(folder)
        except ExperimentExists as error:  # another command has just created it
            raise _exists(path, name) from error
        except FileExistsError as error:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise UserError(
                f"cannot load {path}: {error.filename} exists already; name another shared storage with --storage"
            ) from error
        except BaseException:
            folder.remove()
            raise
    return LoadedExperiment(folder, config, has_its_code)


def _exists(path: Path, name: str) -> UserError:
    return UserError(
        f"cannot load {path}: experiment {name} exists already; run `nnictl experiment delete {name}` first"
    )


@contextlib.contextmanager
def _as_archive_unusable(path: Path) -> Iterator[None]:
    try:
        yield
    except (*NOT_WHOLE, *_UNPACK_ERRORS, ConfigInvalid, InternalError, TableMissing) as error:
        cause = error.__cause__ if isinstance(error, TableMissing) else error
        why = (
            "its content is nested too deeply"
            if isinstance(error, RecursionError)
            else escaped("; ".join(str(cause).splitlines()))
        )
        raise UserError(
            f"cannot load {path}: it is not an archive of `nnictl experiment save`, or it is incomplete "
            f"({why[:_MAX_REASON_CHARACTERS]}); save the experiment again"
        ) from error


def _id_of(manifest: Path) -> str:
    if manifest.stat().st_size > _MAX_MANIFEST_BYTES:
        raise ValueError(f"its {_MANIFEST} has more than {_MAX_MANIFEST_BYTES} bytes")
    document: dict[str, Any] = json.loads(manifest.read_bytes())
    if document["format"] != _FORMAT:
        raise ValueError(
            f"its format {document['format']!r} is of version {document['version']!r}; this version is {__version__}"
        )
    name = document["experimentId"]
    if not isinstance(name, str) or not is_safe_name(name):
        raise ValueError(f"{name!r} is not a valid id")
    return name


def _placed(
    config: ExperimentSpec, folder: ExperimentFolder, locations: Locations, path: Path, *, has_code: bool
) -> ExperimentSpec:
    """The config with the paths and the login of this machine."""
    if config.is_annotated:
        code_dir = folder.generated_code
    elif locations.code_dir is not None:
        code_dir = locations.code_dir
    else:
        code_dir = folder.path / "saved-code" if has_code else config.code_dir
    if not (has_code or config.is_annotated or config.objective or code_dir.is_dir()):
        raise UserError(
            f"cannot load {path}: it contains no code, and there is no folder {escaped(str(code_dir))}; name the code folder "
            "with --codeDir, or save the experiment with --saveCodeDir"
        )
    moved = ExperimentSpec.from_json(
        json.dumps(_moved(json.loads(config.to_json()), config.code_dir, code_dir))
    )
    cluster = platform_of(moved).section_from_archive(locations, path)
    return moved.replace(log_dir=locations.log_dir, cluster=cluster, expansions=())


def _moved(value: Any, old: Path, new: Path, key: str = "") -> Any:
    """The config with paths in the code folder moved to the new one; so snapshots still exclude a login beside the code."""
    if isinstance(value, dict):
        return {name: _moved(each, old, new, name) for name, each in value.items()}
    if key in _IN_CODE and isinstance(value, str) and Path(value).is_relative_to(old):
        return str(new / Path(value).relative_to(old))
    return value


def _fill(
    folder: ExperimentFolder, config: ExperimentSpec, part: Path, limits: ArchiveLimits, path: Path
) -> bool:
    """Move the unpacked files to their folders; False if the code was left out, because the code folder is not empty."""
    for name in _FOLDERS:
        if (part / name).is_dir():
            (part / name).replace(folder.path / name)  # an empty folder may be there
    for name in _WORKSPACE:
        for each in (part / name).iterdir() if (part / name).is_dir() else ():
            (folder.workspace.root / name).mkdir(0o755, exist_ok=True)
            shutil.move(each, folder.workspace.root / name / each.name)
            if folder.workspace.root != folder.path:
                _open_to_read(folder.workspace.root / name / each.name)
    if not (part / _CODE).exists():
        return True
    if config.code_dir.is_dir() and any(config.code_dir.iterdir()):
        return False
    config.code_dir.mkdir(parents=True, exist_ok=True)
    _unpack_code(part / _CODE, config.code_dir, limits, path)
    return True


def _open_to_read(folder: Path) -> None:
    """Make the folder world-readable: containers read a workspace on shared storage as other users."""
    for above, _, files in os.walk(folder):
        os.chmod(above, 0o755)
        for each in files:
            os.chmod(Path(above) / each, 0o644)


def _unpack_code(code: Path, target: Path, limits: ArchiveLimits, path: Path) -> None:
    """Unpack the code completely or not at all, because trials run whatever code the folder contains."""
    with tempfile.TemporaryDirectory(dir=target, prefix=".loading-") as temporary:
        part = Path(temporary)
        with _as_archive_unusable(path):
            unpack_code(code, part, limits, f"{path}: {_CODE}")
        for each in list(part.iterdir()):
            each.rename(target / each.name)


def default_target(experiment_id: str) -> Path:
    """The default path of an experiment's archive."""
    return Path(f"{experiment_id}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
