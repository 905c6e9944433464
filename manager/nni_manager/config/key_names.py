"""The name of a key in messages about one experiment."""

from __future__ import annotations

from nni_manager.config.model import ExperimentSpec

# Keys of NNI's first schema in the second one.
_KEYS_OF_V2 = {
    "trial.command": "trialCommand",
    "trial.codeDir": "trialCodeDirectory",
    "logDir": "experimentWorkingDirectory",
}


def key_of(config: ExperimentSpec, key: str) -> str:
    """A key of NNI's first schema, as the file of this experiment writes it.

    A configuration in Python keeps the key: `to_python_names` translates it.
    """
    # Imported here: it takes 0.1 s, and other commands do not need it.
    from nni_manager.config.python_document import CALLED

    is_file_of_v2 = config.file_schema == "v2" and config.config_path.name != CALLED
    return _KEYS_OF_V2[key] if is_file_of_v2 else key
