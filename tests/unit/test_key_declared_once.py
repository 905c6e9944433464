"""A key that all platforms share is declared in one line of `config/shared_keys.py`. All other code uses this declaration."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CORPUS = Path(__file__).parents[1] / "golden" / "config" / "files"
# This program adds a key to the source of shared_keys before the module is imported, then prints the effects of the key.
ADD_A_KEY = """
import importlib.util, json, sys
from pathlib import Path

import pytest

name, key = "nni_manager.config.shared_keys", sys.argv[1]
spec = importlib.util.find_spec(name)
source = Path(spec.origin).read_text()
above = "    trial_concurrency: "
assert source.count(above) == 1
sys.modules[name] = module = importlib.util.module_from_spec(spec)
exec(compile(source.replace(above, f"    {key}\\n{above}"), spec.origin, "exec"), module.__dict__)

from nni_manager.config.convert import convert
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.json_schema import json_schema
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.reader import read_experiment_file

read = read_experiment_file(Path("config.yml"))
Path("wrong.yml").write_text(Path("config.yml").read_text().replace("5m", "five"))
try:
    read_experiment_file(Path("wrong.yml"))
except ConfigInvalid as error:
    message = str(error)
print(json.dumps({
    "read": read.trial_rest,
    "replaced": read.replace(trial_rest=1.0).trial_rest,
    "restored": ExperimentSpec.from_json(read.to_json()).trial_rest,
    "converted": [line for line in convert(Path("config.yml")).text.splitlines() if line.startswith("trialRest")],
    "described": json_schema("v1")["properties"]["trialPause"]["description"],
    "error": message,
}))
"""
KEY = (
    'trial_rest: Duration = duration("1m", since="0.8", v1="trialPause", about="the time between two trials")'
)


@pytest.mark.slow
def test_one_declaration_of_a_key_suffices_to_read_and_check_and_store_and_convert_and_document_the_key(
    tmp_path,
):
    text = (CORPUS / "v1_local_smallest.yml").read_text()
    (tmp_path / "config.yml").write_text(text + "trialPause: 5m\n")
    (tmp_path / "search_space.json").write_text((CORPUS / "search_space.json").read_text())
    done = subprocess.run(
        [sys.executable, "-c", ADD_A_KEY, KEY], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    line = text.count("\n") + 1
    assert json.loads(done.stdout) == {
        "read": 300.0,
        "replaced": 1.0,
        "restored": 300.0,
        "converted": ["trialRest: 5m"],
        "described": "The time between two trials. Value: a whole number and one of s, m, h, d",
        "error": f'wrong.yml:{line}: cannot use trialPause: "five" is not a whole number and one of s, m, h, d; '
        "write e.g. trialPause: 1m",
    }
