"""The interpreter and the installed packages of a trial, from the training code's report of its `sys.path`.

The SDK writes `.nni/python.json` when it reads the parameters: one small file. The keeper lists the packages, once for all trials
with the same paths, as `importlib.metadata` finds them: by the names of the folders of their metadata, without opening any.
"""

import contextlib
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from trial_keeper.cluster_environment import node_name
from trial_keeper.wire.messages import Environment
from trial_keeper.wire.safe_open import UnsafePath, read_beneath
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.workspace import MAX_PACKAGES_BYTES, AttemptFolder, Workspace

# A sys.path of some hundred long entries.
_MAX_REPORT_BYTES = 64 << 10
_MAX_PATHS = 500
# As in `importlib.metadata`: NAME-VERSION.dist-info, and NAME-VERSION[-pyX.Y].egg-info of old installers.
_METADATA = re.compile(r"([A-Za-z0-9][\w.]*)-([\w.!+]+)(?:\.dist-info|(?:-py[\d.]+)?\.egg-info)")
_SEPARATORS = re.compile(r"[-_.]+")


class Packages:
    """The environments of the trials of one job. Each list of packages is written to the workspace once."""

    def __init__(self, workspace: Workspace, environ: Mapping[str, str]) -> None:
        self._workspace = workspace
        # A name that is no text is not worth a failed trial.
        self._here = Environment(_printable(socket.gethostname()), _printable(node_name(environ)))
        self._known: tuple[object, str] = (None, "")
        """The last paths with their times of change, and the digest of their packages."""

    @property
    def here(self) -> Environment:
        """The host and the node, without the interpreter."""
        return self._here

    def of(self, folder: AttemptFolder) -> Environment:
        """The environment of an attempt; without the interpreter if the training code has not reported it, or not correctly."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            content = read_beneath(folder.path, folder.python_json, _MAX_REPORT_BYTES).data
            report = json.loads(content)
            paths = tuple(str(path) for path in report["path"][:_MAX_PATHS])
            found = replace(self._here, python=str(report["version"]))
            return replace(found, packages=self._digest_of(paths))
        return self._here

    def _digest_of(self, paths: tuple[str, ...]) -> str:
        state = [(path, _changed_ns(path)) for path in paths]
        if self._known[0] != state:
            content = "".join(f"{line}\n" for line in installed(paths)).encode()
            digest = hashlib.sha256(content).hexdigest() if len(content) <= MAX_PACKAGES_BYTES else ""
            if digest:
                self._write(digest, content)
            self._known = state, digest
        return self._known[1]

    def _write(self, digest: str, content: bytes) -> None:
        path = self._workspace.packages / digest
        # Without the list the digest still distinguishes environments.
        with contextlib.suppress(OSError, UnsafePath):
            if not path.exists():
                replace_file(path, content)


def installed(paths: Iterable[str]) -> list[str]:
    """NAME==VERSION of each package in these folders, sorted. Of several versions the first one in the paths is imported.

    Names are in their normalized form. Source: PEP 503, PEP 376.
    """
    found: dict[str, str] = {}
    for path in paths:
        names: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            names = sorted(os.listdir(path)) if path else []
        for match in filter(None, map(_METADATA.fullmatch, names)):
            found.setdefault(_SEPARATORS.sub("-", match[1]).lower(), match[2])
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _changed_ns(path: str) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return os.stat(path).st_mtime_ns
    return None


def _printable(name: str) -> str:
    return name if name.isprintable() and len(name) <= 253 else ""
