"""Platforms are packages: a module of one is imported only for experiments on it, and no other code names one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nni_manager.config.platforms import BY_V1

CHECK = Path(__file__).parents[1] / "prose" / "check_platforms.py"
CORPUS = Path(__file__).parents[1] / "golden" / "config" / "files"
SERVICES = "nni_manager.training_services"
# What experiments on a platform need besides its own package.
SHARED = {"kubeflow": {"kubernetes"}, "frameworkcontroller": {"kubernetes"}}
READ = """
import json, sys
from pathlib import Path
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.reader import read_experiment_file
from nni_manager.training_services.platform import platform_of

config = ExperimentSpec.from_json(read_experiment_file(Path(sys.argv[1])).to_json())
platform_of(config)
platform_of(config.without_secrets()).address_for_keepers
print(json.dumps([config.training_service, sorted(sys.modules)]))
"""


def packages_after_reading(file):
    """The platform of an experiment file, and the packages of platforms whose modules have been imported."""
    done = subprocess.run([sys.executable, "-c", READ, str(file)], capture_output=True, text=True, check=True)
    platform, modules = json.loads(done.stdout)
    folders = {
        each.split(".")[2] for each in modules if each.startswith(f"{SERVICES}.") and each.count(".") > 2
    }
    return platform, folders | (
        {"local_openpai"} if any(".local_openpai." in each for each in modules) else set()
    )


@pytest.mark.parametrize(
    "name",
    ["v1_local_smallest", "v2_local_detailed", "v1_pai_page", "v2_openpai", "v1_kubeflow_pytorch", "v2_kubeflow_job",
     "v1_frameworkcontroller", "v2_frameworkcontroller"],
)  # fmt: skip
def test_an_experiment_imports_no_module_of_another_platform(name):
    platform, imported = packages_after_reading(CORPUS / f"{name}.yml")
    assert imported == {BY_V1[platform].name} | SHARED.get(platform, set())


def test_only_the_table_and_the_packages_of_platforms_name_a_platform():
    done = subprocess.run([sys.executable, CHECK], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)
