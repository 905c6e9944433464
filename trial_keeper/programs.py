"""The programs that this package and NNI's install under one name."""

import shutil


def foreign_nnictl(path: str | None = None) -> str | None:
    """Return the `nnictl` that a shell finds first if it is another package's, such as NNI's; None if it is ours or absent.

    `path`: the folders to search; None: those of PATH.
    """
    found = shutil.which("nnictl", path=path)
    if found is None:
        return None
    try:
        with open(found, "rb") as script:
            is_ours = b"nni_manager" in script.read(65536)
    except OSError:
        return None
    return None if is_ours else found
