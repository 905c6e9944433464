"""Platforms are packages: a module of one is imported only for experiments on it, and no other code names one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nni_manager import training_services
from nni_manager.config.convert import convert
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.platforms import BY_V1, PLATFORMS, PlatformRow
from nni_manager.config.reader import read_experiment_file
from nni_manager.experiment import ExperimentConfig
from nni_manager.training_services.platform import platform_of

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


def platform_packages(code, *arguments):
    """What a program prints, and the packages of platforms whose modules it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
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
    platform, imported = platform_packages(READ, str(CORPUS / f"{name}.yml"))
    assert imported == {BY_V1[platform].name} | SHARED.get(platform, set())


def test_the_manager_and_nnictl_import_no_platform_before_an_experiment_names_one():
    code = (
        "import nni_manager.__main__, nni_manager.cli.main, nni_manager.cli.archive, nni_manager.client.remains\n"
        "import json, sys; print(json.dumps(['', sorted(sys.modules)]))"
    )
    assert platform_packages(code) == ("", set())


def test_only_the_table_and_the_packages_of_platforms_name_a_platform():
    done = subprocess.run([sys.executable, CHECK], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)


SECTION = """
from dataclasses import dataclass
from nni_manager.config.cluster import ClusterConfig

@dataclass(frozen=True, slots=True)
class SECTION(ClusterConfig):
    greeting: str
"""
EXPERIMENT_FILE = """
from nni_manager.config.experiment_schema import ExperimentKeys, ServiceKeys
from nni_manager.config.platform_file import PlatformFile
from nni_manager.config.schema import line, mapping
from nni_manager.training_services.echo.section import SECTION

class EchoServiceKeys(ServiceKeys):
    greeting: str = line("a greeting", "hello")

class EchoExperimentKeys(ExperimentKeys):
    training_service: EchoServiceKeys = mapping("{platform: echo}", v1="echoConfig")

class FILE(PlatformFile):
    schema = EchoExperimentKeys

    def cluster(self, file):
        return SECTION(file.training_service.greeting)
"""
PLATFORM = """
from nni_manager.training_services.local.platform import LocalPlatform
from nni_manager.training_services.platform import PlatformCheck

class platform(LocalPlatform):
    def check(self):
        return PlatformCheck(f"echo, which says {self.config.cluster.greeting}")
"""
FILES = {
    "v1": """\
authorName: ada
experimentName: digits
trialConcurrency: 1
trainingServicePlatform: echo
searchSpacePath: space.json
tuner: {builtinTunerName: Random}
trial: {command: "true", codeDir: ., gpuNum: 2}
echoConfig: {greeting: hi}
""",
    "v2": """\
experimentName: digits
trialConcurrency: 1
searchSpaceFile: space.json
tuner: {name: Random}
trialCommand: "true"
trialGpuNumber: 2
trainingService: {platform: echo, greeting: hi, reuseMode: false}
""",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with experiment files; the platform `echo` exists as a package and a row of the table."""
    package = tmp_path / "services" / "echo"
    package.mkdir(parents=True)
    for module, text in {
        "section": SECTION,
        "experiment_file": EXPERIMENT_FILE,
        "platform": PLATFORM,
    }.items():
        (package / f"{module}.py").write_text(text)
    (package / "__init__.py").touch()
    monkeypatch.setattr(training_services, "__path__", [*training_services.__path__, str(package.parent)])
    row = PlatformRow("echo", "echo", "Echo", "echoConfig", "echo")
    monkeypatch.setitem(PLATFORMS, "echo", row)
    monkeypatch.setitem(BY_V1, "echo", row)
    monkeypatch.chdir(tmp_path)
    Path("space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
    for name, text in FILES.items():
        Path(f"{name}.yml").write_text(text)
    return tmp_path


def test_a_folder_and_a_row_of_the_table_are_a_platform(folder):
    configs = {name: read_experiment_file(folder / f"{name}.yml") for name in FILES}
    Path("converted.yml").write_text(convert(folder / "v1.yml", folder).text)
    configs["converted"] = read_experiment_file(folder / "converted.yml")
    written = ExperimentConfig(
        "echo", search_space_file="space.json", trial_command="true", trial_gpu_number=2
    )
    written.trial_concurrency, written.tuner.name, written.training_service.greeting = 1, "Random", "hi"
    configs["python"] = written.checked()
    for name, config in configs.items():
        assert (config.cluster.greeting, config.trial_command, config.trial_gpu_number) == (
            "hi",
            "true",
            2,
        ), name
        assert json.loads(config.to_json())["echo"] == {"greeting": "hi"}, name
        stored = ExperimentSpec.from_json(config.to_json())
        assert stored == config, name
        assert platform_of(stored).check().where == "echo, which says hi", name


def test_a_key_of_a_platform_is_checked_like_any_other(folder):
    (folder / "v1.yml").write_text(FILES["v1"].replace("greeting: hi", "greting: hi"))
    with pytest.raises(ConfigInvalid) as caught:
        read_experiment_file(folder / "v1.yml")
    assert "cannot use echoConfig.greting: there is no such key here; did you mean greeting?" in str(
        caught.value
    )
    assert "cannot do without echoConfig.greeting: it must be a greeting" in str(caught.value)
