"""Each platform is a package whose modules are imported only for experiments on that platform.

No code outside of the packages names a platform.
"""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import platforms as contract
import pytest

from nni_manager import training_services
from nni_manager.config.convert import convert
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.platforms import BY_V1, PLATFORMS, PlatformRow, PlatformUnusable, installed_platforms
from nni_manager.config.reader import read_experiment_file
from nni_manager.experiment import ExperimentConfig
from nni_manager.training_services.platform import platform_of

pytestmark = pytest.mark.slow

CHECK = Path(__file__).parents[1] / "prose" / "check_platforms.py"
CORPUS = Path(__file__).parents[1] / "golden" / "config" / "files"
SERVICES = "nni_manager.training_services"
# An experiment imports the package of its platform, and for these platforms also the named shared packages.
SHARED = {
    "kubeflow": {"kubernetes"},
    "frameworkcontroller": {"kubernetes"},
    "remote": {"ssh"},
    "slurm": {"ssh"},
}
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
    """The output of a program, and the platform packages whose modules the program imports."""
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
def test_an_experiment_imports_only_the_modules_of_its_platform(name):
    platform, imported = platform_packages(READ, str(CORPUS / f"{name}.yml"))
    assert imported == {BY_V1[platform].name} | SHARED.get(platform, set())


def test_the_manager_and_nnictl_import_no_platform_before_an_experiment_selects_a_platform():
    code = (
        "import nni_manager.__main__, nni_manager.cli.main, nni_manager.cli.archive, nni_manager.client.remains\n"
        "import json, sys; print(json.dumps(['', sorted(sys.modules)]))"
    )
    assert platform_packages(code) == ("", set())


def test_platform_names_occur_only_in_the_platform_table_and_the_platform_packages():
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

class TestbedServiceKeys(ServiceKeys):
    greeting: str = line("a greeting", "hello")

class TestbedExperimentKeys(ExperimentKeys):
    training_service: TestbedServiceKeys = mapping("{platform: testbed}", v1="testbedConfig")

class FILE(PlatformFile):
    schema = TestbedExperimentKeys
"""
PLATFORM = """
from nni_manager.training_services.local.platform import LocalPlatform
from nni_manager.training_services.platform import PlatformCheck

class platform(LocalPlatform):
    def check(self):
        return PlatformCheck(f"testbed, which says {self.config.cluster.greeting}")
"""
FILES = {
    "v1": """\
authorName: ada
experimentName: digits
trialConcurrency: 1
trainingServicePlatform: testbed
searchSpacePath: space.json
tuner: {builtinTunerName: Random}
trial: {command: "true", codeDir: ., gpuNum: 2}
testbedConfig: {greeting: hi}
""",
    "v2": """\
experimentName: digits
trialConcurrency: 1
searchSpaceFile: space.json
tuner: {name: Random}
trialCommand: "true"
trialGpuNumber: 2
trainingService: {platform: testbed, greeting: hi, reuseMode: false}
""",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with experiment files. The platform `testbed` is a package and a row in the platform table."""
    package = tmp_path / "services" / "testbed"
    package.mkdir(parents=True)
    for module, text in {
        "section": SECTION,
        "experiment_file": EXPERIMENT_FILE,
        "platform": PLATFORM,
    }.items():
        (package / f"{module}.py").write_text(text)
    (package / "__init__.py").touch()
    monkeypatch.setattr(training_services, "__path__", [*training_services.__path__, str(package.parent)])
    row = PlatformRow("testbed", "testbed", "Testbed", "testbedConfig", "testbed")
    monkeypatch.setitem(PLATFORMS, "testbed", row)
    monkeypatch.setitem(BY_V1, "testbed", row)
    monkeypatch.chdir(tmp_path)
    Path("space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
    for name, text in FILES.items():
        Path(f"{name}.yml").write_text(text)
    return tmp_path


def test_a_package_and_a_table_row_are_sufficient_to_add_a_platform(folder):
    configs = {name: read_experiment_file(folder / f"{name}.yml") for name in FILES}
    Path("converted.yml").write_text(convert(folder / "v1.yml", folder).text)
    configs["converted"] = read_experiment_file(folder / "converted.yml")
    written = ExperimentConfig(
        "testbed", search_space_file="space.json", trial_command="true", trial_gpu_number=2
    )
    written.trial_concurrency, written.tuner.name, written.training_service.greeting = 1, "Random", "hi"
    configs["python"] = written.checked()
    for name, config in configs.items():
        assert (config.cluster.greeting, config.trial_command, config.trial_gpu_number) == (
            "hi",
            "true",
            2,
        ), name
        assert json.loads(config.to_json())["testbed"] == {"greeting": "hi"}, name
        stored = ExperimentSpec.from_json(config.to_json())
        assert stored == config, name
        assert platform_of(stored).check().where == "testbed, which says hi", name


def test_the_error_for_an_unknown_key_of_a_platform_section_contains_a_suggestion(folder):
    (folder / "v1.yml").write_text(FILES["v1"].replace("greeting: hi", "greting: hi"))
    with pytest.raises(ConfigInvalid) as caught:
        read_experiment_file(folder / "v1.yml")
    assert "cannot use testbedConfig.greting: there is no such key here; did you mean greeting?" in str(
        caught.value
    )
    assert "cannot do without testbedConfig.greeting: it must be a greeting" in str(caught.value)


# ---- platforms of installed packages


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution with a platform: metadata, and the modules of the package."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
    for name, text in FILES.items():
        Path(f"{name}.yml").write_text(text)

    def make(distribution, provides="testbed", **modules):
        package = f"package_of_{distribution}"
        (tmp_path / package).mkdir()
        for module, text in ({"__init__": ""} | modules).items():
            own = text.replace("nni_manager.training_services.testbed", package)
            (tmp_path / package / f"{module}.py").write_text(own)
        metadata = tmp_path / f"{distribution}-1.2.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (metadata / "entry_points.txt").write_text(f"[trial_keeper.platforms]\n{provides} = {package}\n")
        return package

    yield make
    for name in [name for name in sys.modules if name.startswith("package_of_")]:
        del sys.modules[name]


def test_a_platform_of_an_installed_package_works_in_files_of_both_schemas_and_in_the_store(install):
    package = install("a", section=SECTION, experiment_file=EXPERIMENT_FILE, platform=PLATFORM)
    assert [(row.name, row.distribution) for row in installed_platforms()] == [("testbed", "a 1.2")]
    assert package not in sys.modules
    for name in FILES:
        config = read_experiment_file(Path(f"{name}.yml"))
        stored = ExperimentSpec.from_json(config.to_json())
        assert stored == config
        assert platform_of(stored).check().where == "testbed, which says hi"
        assert json.loads(config.to_json())["testbedConfig"] == {"greeting": "hi"}


def test_the_list_of_distributions_is_cached_until_another_distribution_is_installed(install, monkeypatch):
    reads = []
    read = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda **group: reads.append(1) or read(**group))
    install("a", section=SECTION, experiment_file=EXPERIMENT_FILE, platform=PLATFORM)
    read_experiment_file(Path("v2.yml"))
    read_experiment_file(Path("v1.yml"))
    assert len(reads) == 1
    install("b", provides="second")
    assert [row.name for row in installed_platforms()] == ["second", "testbed"]
    assert len(reads) == 2


def test_an_experiment_is_shown_but_cannot_run_if_its_platform_package_is_absent(install, monkeypatch):
    install("a", section=SECTION, experiment_file=EXPERIMENT_FILE, platform=PLATFORM)
    text = read_experiment_file(Path("v2.yml")).to_json()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(Path.cwd())])
    stored = ExperimentSpec.from_json(text)
    assert stored.to_json() == text
    assert json.loads(stored.without_secrets().to_json())["testbedConfig"] == {"greeting": "(hidden)"}
    with pytest.raises(
        PlatformUnusable, match="cannot use platform testbed: no package in this Python provides it"
    ):
        platform_of(stored)
    with pytest.raises(ConfigInvalid, match=r'"testbed" is not a platform; .*, or install the package'):
        read_experiment_file(Path("v2.yml"))


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({"experiment_file": "import absent_module"}, "ModuleNotFoundError: No module named 'absent_module'"),
        ({"experiment_file": "FIEL = 1"}, "AttributeError: .*FILE"),
        ({"__init__": "1 / 0"}, "ZeroDivisionError: division by zero"),
        ({}, "ModuleNotFoundError"),
    ],
)
def test_the_error_contains_the_import_error_if_a_platform_package_cannot_be_imported(install, broken, error):
    install("a", **broken)
    message = rf"cannot use platform testbed: FILE of package_of_a.experiment_file, from a 1.2: {error}.*; update that package"
    with pytest.raises(PlatformUnusable, match=message):
        read_experiment_file(Path("v2.yml"))


def test_a_platform_provided_by_two_packages_is_refused(install):
    install("a")
    install("b")
    message = r"cannot choose platform testbed: a 1\.2 and b 1\.2 provide it; uninstall one of them"
    with pytest.raises(PlatformUnusable, match=message):
        read_experiment_file(Path("v2.yml"))


def test_a_built_in_platform_takes_precedence_over_an_installed_platform(install):
    install("a", provides="local", __init__="1 / 0")
    Path("v2.yml").write_text(FILES["v2"].replace("platform: testbed, greeting: hi", "platform: local"))
    assert read_experiment_file(Path("v2.yml")).training_service == "local"


def test_a_package_may_provide_an_nni_platform_that_is_not_built_in(install):
    install("a", provides="aml", section=SECTION, experiment_file=EXPERIMENT_FILE, platform=PLATFORM)
    Path("v2.yml").write_text(FILES["v2"].replace("testbed", "aml"))
    assert read_experiment_file(Path("v2.yml")).training_service == "aml"


def test_the_contract_tests_run_against_every_built_in_platform():
    covered = {"kubeflow" if name in contract.OPERATORS_OF_KUBEFLOW else name for name in contract.PLATFORMS}
    assert not {*PLATFORMS} - covered, "add a class to PLATFORMS of tests/fakes/platforms.py"
