"""Identifies the training code: the digest of its folder, and its git commit."""

import logging
import os
import subprocess
from pathlib import Path

from nni_manager.config.code_folder import CodeUnusable
from nni_manager.domain.provenance import CodeVersion
from nni_manager.engine.code_snapshot import digest_of

log = logging.getLogger(__name__)

# Git reads the state of each file of the folder; on slow storage that takes seconds.
_GIT_TIMEOUT_S = 20.0


def code_version(
    code_dir: Path, workspace: Path, since_s: float, secret_files: tuple[Path, ...] = ()
) -> CodeVersion:
    """The version of the code folder now. Reads every file of it, up to the limits of a snapshot.

    `workspace` and `secret_files` are not part of the code.
    """
    try:
        digest = digest_of(code_dir, workspace, secret_files)
    except CodeUnusable as error:
        log.info("the digest of the code is not recorded: %s", error)
        digest = ""
    commit = _git(code_dir, "rev-parse", "--verify", "HEAD")
    if not commit:
        return CodeVersion(since_s, digest)
    changes = _git(code_dir, "status", "--porcelain", "--untracked-files=normal", "--", ".")
    return CodeVersion(since_s, digest, commit, None if changes is None else bool(changes))


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails or there is no git."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # The folder's configuration may name a program that git would run.
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
    try:
        found = subprocess.run(
            command,
            env=environ | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.decode(errors="replace").strip()
