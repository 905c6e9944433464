"""The name of a key in messages about one experiment."""

from __future__ import annotations

from nni_manager.config import diagnostics
from nni_manager.config.model import ExperimentSpec


def key_of(config: ExperimentSpec, key: str) -> str:
    """A key of NNI's first schema, as the file of this experiment writes it.

    A configuration in Python keeps the key: `to_python_names` translates it.
    """
    # Imported here: it takes 0.1 s, and other commands do not need it.
    from nni_manager.config.keys import names_in_v1
    from nni_manager.config.python_document import CALLED

    if config.file_schema == "v1" or config.config_path.name == CALLED:
        return key
    return next(
        diagnostics.key_of(v2) for v2, v1 in names_in_v1(None).items() if diagnostics.key_of(v1) == key
    )
