"""Lists the public names of the package nni in this Python, by module. The script uses no other module of these tests."""

import importlib
import json
import types

MODULES = (
    "nni",
    "nni.experiment",
    "nni.experiment.config",
    "nni.experiment.data",
    "nni.tuner",
    "nni.assessor",
    "nni.utils",
    "nni.trial",
)


def public_names(module):
    """The names that do not start with _. Modules and names from other packages are excluded."""
    imported = importlib.import_module(module)
    found = []
    for name in dir(imported):
        value = getattr(imported, name)
        home = getattr(value, "__module__", None)
        is_public = not name.startswith("_") and not isinstance(value, types.ModuleType)
        if is_public and (home is None or str(home).startswith("nni")):
            found.append(name)
    return sorted(found)


if __name__ == "__main__":
    print(json.dumps({module: public_names(module) for module in MODULES}))
