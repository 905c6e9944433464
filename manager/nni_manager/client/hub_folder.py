"""The folder of the server of all experiments, in the user's state folder.

Its files are those of a view: a lock that the running server holds, the address and the token, the ended sessions, and stderr.
"""

from __future__ import annotations

import os
import secrets

from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.registry import state_of_user

PROGRAM = "nni_manager.hub"
"""The module that the server runs."""
_SECRET_BYTES = 32


def hub_folder() -> ExperimentFolder:
    """The folder, which may not exist."""
    return ExperimentFolder(state_of_user() / "web")


def make_folder(folder: ExperimentFolder) -> None:
    """Create the folder.

    Raises:
        OSError: it cannot be created.
    """
    folder.path.mkdir(0o700, parents=True, exist_ok=True)
    folder.log.mkdir(0o700, exist_ok=True)


def secret_of(folder: ExperimentFolder) -> bytes:
    """The secret that signs tokens and sessions; created at the first call.

    Raises:
        OSError: it cannot be read or written.
    """
    path = folder.path / "secret"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        found = path.read_bytes()
        if len(found) == _SECRET_BYTES:
            return found
        path.unlink()  # a crash has cut it
        return secret_of(folder)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content := secrets.token_bytes(_SECRET_BYTES))
    return content
