"""`nni.runtime.config`: the folder of a user's own files for NNI. Source: NNI v2.10."""

import os
import sys
from pathlib import Path


def get_config_directory() -> Path:
    """Return the folder, which is created if needed: `NNI_CONFIG_DIR`, or one in this virtual environment, or in the home."""
    given = os.environ.get("NNI_CONFIG_DIR")
    if given is not None:
        folder = Path(given)
    elif sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").is_dir():
        folder = Path(sys.prefix, "nni")
    else:
        folder = Path.home() / ".config/nni"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # each import from this module asks for __path__
        raise AttributeError(name)
    from nni_sdk.aliases import absent

    return absent("nni_sdk.config_folder", name)
