"""A training service from an installed package. The package is the example for authors of platforms, and the tests use it as its
users would.
"""

import json
import os
import shutil
import subprocess

import pytest
import yaml
from deadlines import scaled_s
from free_ports import free_port_pair
from installed_example import EXAMPLE, installed_example
from user_home import BIN, environ_of, left_in

from nni_manager.config.platforms import PLATFORMS

TRAIN = """
import os
import nni_sdk
nni_sdk.get_next_parameter()
nni_sdk.report_final_result(os.nice(0))
"""


@pytest.fixture
def place(tmp_path):
    """A folder with the example's experiment file, in a home of its own."""
    folder = tmp_path / "work"
    folder.mkdir()
    file = yaml.safe_load((EXAMPLE / "config.yml").read_text())
    file |= {"searchSpaceFile": "space.json", "trialCodeDirectory": ".", "maxTrialNumber": 2}
    (folder / "config.yml").write_text(yaml.safe_dump(file))
    (folder / "space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
    (folder / "train.py").write_text(TRAIN)
    return folder


def nnictl(place, *arguments, path=""):
    return subprocess.run(
        [BIN / "nnictl", *arguments],
        cwd=place,
        env=environ_of(place) | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled_s(120),
    )


def platforms(place, path=""):
    rows = json.loads(nnictl(place, "trainingservice", "list", "--json", path=path).stdout)
    return {row["name"]: row["origin"] for row in rows}


def test_an_experiment_on_an_installed_platform_stays_readable_after_the_package_is_removed(place):
    site = installed_example()
    built_in = dict.fromkeys(PLATFORMS, "built in")
    assert platforms(place, site) == built_in | {"nice": "trial-keeper-nice 1.0"}
    created = nnictl(
        place, "create", "config.yml", "--foreground", "--port", str(free_port_pair()), path=site
    )
    assert created.returncode == 0, created.stderr
    assert left_in(place) == []

    # Without `path=site`, nnictl does not find the platform's package, as after `pip uninstall`.
    assert platforms(place) == built_in
    (experiment,) = json.loads(nnictl(place, "experiment", "list", "--all", "--json").stdout)
    assert (experiment["status"], experiment["platform"]) == ("DONE", "nice")
    trials = json.loads(nnictl(place, "trial", "ls", "--json").stdout)
    assert [trial["value"] for trial in trials] == [min(os.nice(0) + 15, 19)] * 2
    resumed = nnictl(place, "resume", experiment["id"])
    assert resumed.returncode == 1
    assert "cannot use platform nice: no package in this Python provides it; install" in resumed.stderr
    refused = nnictl(place, "create", "config.yml")
    assert '"nice" is not a platform' in refused.stderr
    assert nnictl(place, "experiment", "delete", experiment["id"], "--yes").returncode == 0


def test_an_installed_platform_is_imported_only_if_the_experiment_file_names_the_platform(place, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(installed_example(), site)
    (site / "trial_keeper_nice" / "__init__.py").write_text("raise RuntimeError('no licence')")
    assert platforms(place, str(site))["nice"] == "trial-keeper-nice 1.0"
    assert nnictl(place, "experiment", "list", path=str(site)).returncode == 0
    refused = nnictl(place, "create", "config.yml", path=str(site))
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "ERROR: cannot use platform nice: FILE of trial_keeper_nice.experiment_file"
    )
    assert "from trial-keeper-nice 1.0: RuntimeError: no licence; update that package" in refused.stderr
    assert "Traceback" not in refused.stderr
    (place / "config.yml").write_text(
        (place / "config.yml").read_text().replace("platform: nice", "platform: local")
    )
    assert "no licence" not in nnictl(place, "create", "config.yml", path=str(site)).stderr
