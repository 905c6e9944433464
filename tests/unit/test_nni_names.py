"""The public names of NNI's modules: each name exists here, or its import is refused with a remedy."""

import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from nni_manager.experiment.aliases import AliasHint

REPOSITORY = Path(__file__).parents[2]
# tests/fakes/public_names.py writes nni_names.json from the real packages; tests/e2e/test_nni_clients.py checks that the file is
# current.
NAMES = json.loads((REPOSITORY / "tests" / "golden" / "nni_names.json").read_text())
LISTED = [(version, module) for version, modules in NAMES.items() for module in modules]
CODE = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
sys.path.append(sys.argv[1])
found = {}
for module, names in json.loads(sys.argv[2]).items():
    for name in names:
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            found[f"{module}.{name}"] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", NAMES)
def test_each_public_name_of_nni_exists_or_is_refused_with_a_remedy(version):
    command = [sys.executable, "-c", CODE, REPOSITORY / "nni_sdk" / "fallback", json.dumps(NAMES[version])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    refused = json.loads(done.stdout)
    assert len(refused) < 50
    for name, (kind, message) in refused.items():
        assert kind in ("ImportError", "UnsupportedName"), (name, message)
        assert message.startswith("cannot "), name
        assert "; " in message, name
    for name in (
        "nni.get_next_parameter",
        "nni.tuner.Tuner",
        "nni.experiment.Experiment",
        "nni.utils.merge_parameter",
    ):
        assert name not in refused


def test_functions_for_files_of_the_nni_package_are_refused_with_a_remedy():
    with pytest.raises(
        ImportError,
        match="which has no get_config_file; remove its use, or install",
    ):
        importlib.import_module("nni_sdk.config_folder").get_config_file  # noqa: B018 - the test checks this attribute access


def test_a_name_that_does_not_exist_in_nni_raises_an_attribute_error():
    for module in (
        "nni_sdk",
        "nni_sdk.utils",
        "nni_sdk.config_folder",
        "nni_sdk.trial",
        "nni_sdk.tuner",
        "nni_manager.experiment.config",
    ):
        with pytest.raises(AttributeError, match="nothing_of_this_name"):
            importlib.import_module(module).nothing_of_this_name  # noqa: B018 - the test checks this attribute access
    with warnings.catch_warnings():
        warnings.simplefilter("error", AliasHint)
        assert not hasattr(importlib.import_module("nni_sdk.utils"), "__path__")
