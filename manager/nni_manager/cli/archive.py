"""An experiment as one file, to be taken to another machine: `save` makes it, `load` makes an experiment of it.

    manifest.json           the format, the experiment's id, and who wrote it
    experiment.sqlite       the store, without the experiment's secret and without logins
    log/                    logs of the manager, and those of trials that it collected
    code/                   what trials of annotated code run, and
    code-with-annotations/  the files of it that differ, as their user had them
    trials/                 what trials left in the workspace, and
    checkpoints/            what a population of trials goes on from
    code.tar.gz             the code folder, where it was asked for

It holds files and folders only: what else a trial may have put there stays behind. An archive is taken for a stranger's: what
would leave its folder, or run when it is read, is refused or left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import os
import posixpath
import secrets
import shutil
import stat
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nni_manager.config.model import AzureStorage, ClaimStorage, ExperimentConfig, KubernetesConfig, PaiConfig
from nni_manager.engine.code_snapshot import take_snapshot
from nni_manager.errors import Bug, UserMistake
from nni_manager.services import refuse_nameless_claim, storage_here
from nni_manager.store.copying import copy_store
from nni_manager.store.folders import ExperimentFolder, Registry
from nni_manager.store.store import StoreReader
from nni_manager.tuner.foreign_memo import without_programs
from trial_keeper import __version__
from trial_keeper.wire.own_files import NotOwnFile, open_inside
from trial_keeper.wire.workspace import Workspace, is_safe_name

_FORMAT = 1
_MANIFEST, _STORE, _CODE = "manifest.json", "experiment.sqlite", "code.tar.gz"
# Of the workspace.
_TRIALS = "trials"
_WORKSPACE = (_TRIALS, "checkpoints")
# Of the experiment's folder. Not its keys, its notes of processes, the local jobs, which another machine has not, and what a
# tuner of the user's own has kept: that may be a pickle, which nobody should read of an archive.
_FOLDERS = ("log", "code", "code-with-annotations")
# Keys of the config, at any depth, that name something which may lie in the code folder.
_IN_CODE = ("code_dir", "config_path", "job_file")
# A trial's own copy of the code lies here, below its attempt's folder; the code itself is told apart.
_CODE_DEPTH = 4


class ArchiveUnusable(UserMistake):
    """cannot use the archive; save the experiment again"""


@dataclass(frozen=True, slots=True)
class Places:
    """Where things of a loaded experiment are to be; None: where the archive has them, or where they always are."""

    log_dir: Path
    code_dir: Path | None = None
    storage: Path | None = None
    token: str | None = None
    password: str | None = None


# ---- save


def save(folder: ExperimentFolder, target: Path, *, has_code: bool) -> list[str]:
    """Write the archive; what the user should know of it. Nobody may own the experiment meanwhile.

    Raises:
        UserMistake: the experiment is not over, or its code cannot be packed.
        OSError: the archive cannot be written.
    """
    if not target.parent.is_dir():
        raise UserMistake(
            f"cannot write {target}: there is no folder {target.parent}; make it, or name another"
        )
    with StoreReader(folder.database) as reader:
        config = ExperimentConfig.from_json(reader.experiment().config)
    warnings, left_out = [], 0
    if config.kubernetes is not None and isinstance(config.kubernetes.storage, AzureStorage):
        warnings.append(f"{target} holds nothing of what trials left on the share; get it there")
    template = config.kubernetes.template_text if config.kubernetes is not None else None
    if template or (config.pai is not None and config.pai.job_text):
        warnings.append(f"{target} holds the job file of the experiment, with whatever secrets stand in it")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        part = Path(temporary)
        copy_store(folder.database, part / _STORE, config=_without_login(config).to_json(), secret=b"")
        if has_code and not config.is_annotated:
            storage = storage_here(config)
            excluded = (config.log_dir,) if storage is None else (config.log_dir, storage)
            snapshot = take_snapshot(config.code_dir, Workspace(part), config.secret_files, excluded)
            os.rename(part / snapshot.name, part / _CODE)
        # 0600: it holds what the experiment's folder holds.
        with open(os.open(part / "archive", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
                _add_bytes(archive, _MANIFEST, _manifest(folder.experiment_id))
                for name in (_STORE, _CODE):
                    if (part / name).exists():
                        _add_file(archive, name, part / name, part)
                for name in _FOLDERS:
                    left_out += _add_tree(archive, name, folder.path / name)
                for name in _WORKSPACE:
                    left_out += _add_tree(archive, name, folder.workspace.root / name)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part / "archive", target)
    if left_out:
        warnings.append(
            f"{left_out} links, pipes or unreadable files that trials left behind are not in {target}"
        )
    return warnings


def _without_login(config: ExperimentConfig) -> ExperimentConfig:
    if config.pai is None:
        return config
    return dataclasses.replace(config, pai=dataclasses.replace(config.pai, token=None, password=None))


def _manifest(experiment_id: str) -> bytes:
    return json.dumps(
        {"format": _FORMAT, "experimentId": experiment_id, "version": __version__}, indent=1
    ).encode()


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    archive.addfile(member, io.BytesIO(content))


def _add_file(archive: tarfile.TarFile, name: str, path: Path, root: Path) -> None:
    with open(open_inside(root, path), "rb") as file:
        status = os.fstat(file.fileno())
        member = tarfile.TarInfo(name)
        member.size, member.mtime = status.st_size, int(status.st_mtime)
        member.mode = 0o700 if status.st_mode & stat.S_IXUSR else 0o600
        archive.addfile(member, file)


def _add_tree(archive: tarfile.TarFile, name: str, root: Path) -> int:
    """Add a folder, if there is one; how much of it is neither file nor folder, or cannot be read."""
    if not root.is_dir():
        return 0
    left_out = 0
    for above, folders, files in os.walk(root):
        here = Path(above).relative_to(root)
        if name == _TRIALS and len(here.parts) == _CODE_DEPTH and "code" in folders:
            folders.remove("code")
        folders.sort()
        left_out += sum((Path(above) / each).is_symlink() for each in folders)
        member = tarfile.TarInfo(str(Path(name) / here))
        member.type, member.mode = tarfile.DIRTYPE, 0o700
        archive.addfile(member)
        for each in sorted(files):
            try:
                _add_file(archive, str(Path(name) / here / each), Path(above) / each, root)
            except (NotOwnFile, PermissionError):
                left_out += 1
    return left_out


# ---- load


def load(path: Path, places: Places) -> tuple[ExperimentFolder, ExperimentConfig]:
    """Make an experiment of the archive; its folder and what it runs. Nothing of it runs yet, and it is owned by nobody.

    Whatever goes wrong, nothing is left.

    Raises:
        ArchiveUnusable: it is no archive that `save` made.
        UserMistake: the experiment is here already, or something that it needs is not.
    """
    places.log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=places.log_dir, prefix=".loading-") as temporary:
        part = Path(temporary)
        with _own_words(path):
            _unpack(path, part, {_MANIFEST, _STORE, _CODE}, {*_FOLDERS, *_WORKSPACE})
            name = _id_of(part / _MANIFEST)
            with StoreReader(part / _STORE) as reader:
                stored = reader.experiment()
                if stored.experiment_id != name:
                    raise ValueError(f"it is of {name!r} and holds {stored.experiment_id!r}")
                config = ExperimentConfig.from_json(stored.config)
        folder = ExperimentFolder(places.log_dir / name)
        known = {each.experiment_id for each in Registry.of_user().all() if each.path.exists()}
        if name in known or folder.path.exists():
            raise UserMistake(
                f"cannot load {path}: experiment {name} is here already; `nnictl experiment delete {name}` first"
            )
        config = _placed(config, folder, places, path, has_code=(part / _CODE).exists())
        refuse_nameless_claim(config)
        storage = storage_here(config)
        try:
            folder.make(storage, reuses_jobs=config.reuse.is_on)
            with _own_words(path):
                copy_store(
                    part / _STORE,
                    folder.database,
                    config=config.to_json(),
                    secret=secrets.token_bytes(32),
                    memo_of=without_programs,
                )
            _fill(folder, config, part)
            Registry.of_user().add(folder)
        except FileExistsError as error:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise UserMistake(
                f"cannot load {path}: {error.filename} is there already; name another shared storage with --storage"
            ) from error
        except BaseException:
            folder.remove()
            raise
    return folder, config


@contextlib.contextmanager
def _own_words(path: Path) -> Iterator[None]:
    try:
        yield
    except (
        tarfile.TarError,
        gzip.BadGzipFile,
        zlib.error,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        Bug,
    ) as error:
        raise ArchiveUnusable(
            f"cannot load {path}: it is no archive that `nnictl experiment save` made, or not whole ({error}); save the "
            "experiment again"
        ) from error


def _id_of(manifest: Path) -> str:
    document: dict[str, Any] = json.loads(manifest.read_bytes())
    if document["format"] != _FORMAT:
        raise ValueError(
            f"its format is {document['format']!r}, of version {document['version']!r}, and this is {__version__}"
        )
    name = document["experimentId"]
    if not isinstance(name, str) or not is_safe_name(name):
        raise ValueError(f"{name!r} is no id")
    return name


def _unpack(path: Path, target: Path, files: set[str], folders: set[str]) -> None:
    """Unpack what is named; anything else is refused."""
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            first, *rest = member.name.split("/")
            is_named = (first in files and not rest and member.isreg()) or (
                first in folders and (member.isdir() or (member.isreg() and rest))
            )
            if not is_named or posixpath.normpath(member.name) != member.name:
                raise ValueError(f"{member.name!r} is not of an experiment")
            member.mode = 0o700 if member.isdir() or member.mode & stat.S_IXUSR else 0o600
            if hasattr(tarfile, "data_filter"):
                archive.extract(member, target, filter="data")
            else:  # Python 3.10 before 3.10.12, and 3.11 before 3.11.4
                member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
                archive.extract(member, target)


def _placed(
    config: ExperimentConfig, folder: ExperimentFolder, places: Places, path: Path, *, has_code: bool
) -> ExperimentConfig:
    """The experiment with the paths and the login of this machine."""
    if config.is_annotated:
        code_dir = folder.generated_code
    elif places.code_dir is not None:
        code_dir = places.code_dir
    else:
        code_dir = folder.path / "saved-code" if has_code else config.code_dir
    if not (has_code or config.is_annotated or code_dir.is_dir()):
        raise UserMistake(
            f"cannot load {path}: it holds no code, and there is no folder {code_dir}; name the code's folder with --codeDir, "
            "or save the experiment with --saveCodeDir"
        )
    moved = ExperimentConfig.from_json(
        json.dumps(_moved(json.loads(config.to_json()), config.code_dir, code_dir))
    )
    pai = None if moved.pai is None else _with_login(moved.pai, places, path)
    kubernetes = None if moved.kubernetes is None else _with_storage(moved.kubernetes, places, path)
    return dataclasses.replace(moved, log_dir=places.log_dir, pai=pai, kubernetes=kubernetes, expansions=())


def _moved(value: Any, old: Path, new: Path, key: str = "") -> Any:
    """The config with all that lies in the code folder where that is now; so a login beside the code stays out of snapshots."""
    if isinstance(value, dict):
        return {name: _moved(each, old, new, name) for name, each in value.items()}
    if key in _IN_CODE and isinstance(value, str) and Path(value).is_relative_to(old):
        return str(new / Path(value).relative_to(old))
    return value


def _with_storage(kubernetes: KubernetesConfig, places: Places, path: Path) -> KubernetesConfig:
    """An NFS export is found where it is mounted; where the volume of a claim is, only the user knows."""
    if not isinstance(kubernetes.storage, ClaimStorage):
        return kubernetes
    storage = _storage_at(places.storage or kubernetes.storage.path, path)
    return dataclasses.replace(kubernetes, storage=dataclasses.replace(kubernetes.storage, path=storage))


def _storage_at(storage: Path, path: Path) -> Path:
    if not storage.is_dir():
        raise UserMistake(
            f"cannot load {path}: there is no folder {storage}; name with --storage where this machine has the shared storage"
        )
    return storage


def _with_login(pai: PaiConfig, places: Places, path: Path) -> PaiConfig:
    storage = _storage_at(places.storage or pai.storage, path)
    if not (pai.is_local or places.token or places.password):
        raise UserMistake(
            f"cannot load {path}: it runs on OpenPAI {pai.host}, and archives hold no login; set OPENPAI_TOKEN, or "
            f"OPENPAI_PASSWORD, to that of {pai.user}"
        )
    return dataclasses.replace(
        pai, storage=storage, token=places.token, password=None if places.token else places.password
    )


def _fill(folder: ExperimentFolder, config: ExperimentConfig, part: Path) -> None:
    for name in _FOLDERS:
        if (part / name).is_dir():
            shutil.move(part / name, _made_way(folder.path / name))
    for name in _WORKSPACE:
        for each in (part / name).iterdir() if (part / name).is_dir() else ():
            (folder.workspace.root / name).mkdir(exist_ok=True)
            shutil.move(each, folder.workspace.root / name / each.name)
            if folder.workspace.root != folder.path:
                _open_to_read(folder.workspace.root / name / each.name)
    if (part / _CODE).exists() and not _holds_anything(config.code_dir):
        config.code_dir.mkdir(parents=True, exist_ok=True)
        _unpack_code(part / _CODE, config.code_dir)


def _made_way(path: Path) -> Path:
    """Where something is to be moved; an empty folder that is there goes."""
    if path.is_dir():
        path.rmdir()
    return path


def _open_to_read(folder: Path) -> None:
    """A workspace on a shared storage is read by the users that containers run as."""
    for above, _, files in os.walk(folder):
        os.chmod(above, 0o755)
        for each in files:
            os.chmod(Path(above) / each, 0o644)


def _holds_anything(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _unpack_code(path: Path, target: Path) -> None:
    """Links are the code's own; none may lead out, and nothing is written through one."""
    links: set[str] = set()
    with _own_words(path), tarfile.open(path, "r:gz") as archive:
        for member in archive:
            above = {posixpath.normpath(str(each)) for each in Path(member.name).parents}
            name = posixpath.normpath(member.name)
            if not (member.isreg() or member.isdir() or member.issym()) or not links.isdisjoint(
                {*above, name}
            ):
                raise ValueError(f"{member.name!r} of the code is neither file nor folder nor link")
            if _leads_out(member.name):
                raise ValueError(f"{member.name!r} of the code lies outside")
            if member.issym():
                links.add(name)
                if posixpath.isabs(member.linkname) or _leads_out(
                    posixpath.join(posixpath.dirname(member.name), member.linkname)
                ):
                    raise ValueError(f"{member.name!r} of the code leads outside")
            member.mode = 0o755 if member.isdir() or member.mode & stat.S_IXUSR else 0o644
            if hasattr(tarfile, "data_filter"):
                archive.extract(member, target, filter="data")
            else:
                member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
                archive.extract(member, target)


def _leads_out(path: str) -> bool:
    return posixpath.isabs(path) or posixpath.normpath(path).split("/")[0] == ".."


def default_target(experiment_id: str) -> Path:
    """Where an experiment is saved to when nothing else is said."""
    return Path(f"{experiment_id}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
