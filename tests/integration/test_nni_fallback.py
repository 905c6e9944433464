"""`import nni` in a trial imports the real package if this Python finds one; otherwise it imports the SDK as `nni`."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from pythons import each_of, python_of

from nni_manager.engine.shared_files import _write_sdk
from trial_keeper.wire.workspace import Workspace

BASE = sys._base_executable
LIB = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
SHOW = "import nni; from nni.tuner import WHO; print(nni.__version__, nni.tuner.WHO, nni.__file__)"
SHOW_OURS = "import nni; from nni.tuner import Tuner; print(nni.__name__, Tuner.__module__, nni.__version__)"
OURS = "nni_sdk nni_sdk.tuner 3.0\n"
# For an editable package nni in a folder that is not named nni, setuptools installs a finder like this one.
FINDER = """
import sys
from importlib.util import spec_from_file_location

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "nni":
            return spec_from_file_location(name, {init!r}, submodule_search_locations=[{package!r}])

def install():
    sys.meta_path.append(Finder)
"""


@pytest.fixture
def sdk(tmp_path):
    """The SDK folder of a workspace. Trials have this folder in their Python path."""
    return new_sdk(tmp_path / "workspace")


def new_sdk(folder):
    folder.mkdir()
    workspace = Workspace(folder)
    _write_sdk(workspace)
    return workspace.sdk


@pytest.fixture
def site_packages(tmp_path):
    """The site-packages folder of a new virtual environment, `tmp_path/venv`."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    return tmp_path / "venv" / LIB / "site-packages"


def real_nni(folder, init=""):
    """Make a package `nni` that is similar enough to NNI's package for these tests."""
    package = folder / "nni"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = '2.10.1'\nfrom .tuner import WHO\n{init}")
    (package / "tuner.py").write_text("WHO = 'real'\n")
    return package


def ran(python, code, sdk, *, before=(), after=(), folder=None, **environ):
    """Run code in this Python like a trial, with the SDK in PYTHONPATH. Return its stdout, and the last line of its stderr."""
    path = os.pathsep.join(map(str, [*before, sdk, *after]))
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("NNI_", "PYTHON"))}
    (script := Path(folder or sdk.parent) / "script.py").write_text(code)
    done = subprocess.run(
        [python, script],
        env=outside | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return done.stdout, (done.stderr.splitlines() or [""])[-1]


def in_a_venv(tmp_path, site_packages):
    return tmp_path / "venv/bin/python", real_nni(site_packages), {}


def in_the_user_site(tmp_path, site_packages):
    return (
        BASE,
        real_nni(tmp_path / "user" / LIB / "site-packages"),
        {"PYTHONUSERBASE": str(tmp_path / "user")},
    )


def by_a_path_file(tmp_path, site_packages):
    (site_packages / "editable.pth").write_text(f"{tmp_path / 'source'}\n")
    return tmp_path / "venv/bin/python", real_nni(tmp_path / "source"), {}


def by_a_finder(tmp_path, site_packages):
    package = real_nni(tmp_path / "source")
    (site_packages / "nni_finder.py").write_text(
        FINDER.format(init=str(package / "__init__.py"), package=str(package))
    )
    (site_packages / "editable.pth").write_text("import nni_finder; nni_finder.install()\n")
    return tmp_path / "venv/bin/python", package, {}


def in_a_prefix(tmp_path, site_packages):
    """An installation like conda's: the prefix has its own standard library, and no pyvenv.cfg."""
    prefix = tmp_path / "prefix"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "conda-meta").mkdir()
    (prefix / LIB).mkdir(parents=True)
    python = prefix / "bin/python"
    os.link(os.path.realpath(BASE), python)
    for entry in Path(sys.base_prefix, LIB).iterdir():
        if entry.name != "site-packages":
            (prefix / LIB / entry.name).symlink_to(entry)
    # Debian names the packages folder dist-packages instead of site-packages, so Python itself prints its path.
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return python, real_nni(Path(packages.stdout.strip())), {}


def on_the_path_after_the_sdk(tmp_path, site_packages):
    return BASE, real_nni(tmp_path / "source"), {"after": [tmp_path / "source"]}


def on_the_path_before_the_sdk(tmp_path, site_packages):
    return BASE, real_nni(tmp_path / "source"), {"before": [tmp_path / "source"]}


def beside_the_script(tmp_path, site_packages):
    return BASE, real_nni(tmp_path / "code"), {"folder": tmp_path / "code"}


PLACES = (
    in_a_venv,
    in_the_user_site,
    by_a_path_file,
    by_a_finder,
    in_a_prefix,
    on_the_path_after_the_sdk,
    on_the_path_before_the_sdk,
    beside_the_script,
)


@pytest.mark.parametrize("place", PLACES)
def test_import_nni_imports_the_real_package_instead_of_the_sdk_wherever_the_package_is_installed(
    sdk, tmp_path, site_packages, place
):
    python, package, options = place(tmp_path, site_packages)
    assert ran(python, SHOW, sdk, **options) == (f"2.10.1 real {package / '__init__.py'}\n", "")


def test_import_nni_imports_a_module_nni_of_the_user_instead_of_the_sdk(sdk, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/nni.py").write_text("__version__ = 'of the user'\n")
    code = "import nni; print(nni.__version__)"
    assert ran(BASE, code, sdk, after=[tmp_path / "source"]) == ("of the user\n", "")


@pytest.mark.parametrize(
    "python", each_of({version: python_of(version) for version in ("3.5", "3.6", "3.7", "3.13")})
)
def test_import_nni_imports_the_real_package_instead_of_the_sdk_in_every_python_version(
    sdk, tmp_path, python
):
    package = real_nni(tmp_path / "source")
    shown = f"2.10.1 real {package / '__init__.py'}\n"
    assert ran(python, SHOW, sdk, after=[tmp_path / "source"]) == (shown, "")


@pytest.mark.parametrize("python", each_of({f"3.{minor}": python_of(f"3.{minor}") for minor in range(7, 15)}))
def test_import_nni_returns_the_sdk_if_no_package_is_installed(sdk, tmp_path, python):
    # This folder `nni` has no __init__.py. It could be a user's folder of checkpoints, so Python must not import it as the
    # package.
    (tmp_path / "code/nni").mkdir(parents=True)
    assert ran(python, SHOW_OURS, sdk, folder=tmp_path / "code") == (OURS, "")


def test_import_nni_finds_the_real_package_after_the_sdk_folders_of_two_workspaces_on_sys_path(sdk, tmp_path):
    second = new_sdk(tmp_path / "second")
    assert ran(BASE, SHOW_OURS, sdk, after=[second, second]) == (OURS, "")
    package = real_nni(tmp_path / "source")
    after = [second, sdk, tmp_path / "source"]
    assert ran(BASE, SHOW, sdk, after=after) == (f"2.10.1 real {package / '__init__.py'}\n", "")


def test_an_import_hook_that_searches_all_of_sys_path_does_not_import_the_sdk_as_the_real_package(
    sdk, tmp_path
):
    hook = """
import sys
from importlib.machinery import PathFinder

class Hook:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name)

sys.meta_path.insert(0, Hook)
"""
    assert ran(BASE, hook + SHOW_OURS, sdk) == (OURS, "")
    package = real_nni(tmp_path / "source")
    shown = f"2.10.1 real {package / '__init__.py'}\n"
    assert ran(BASE, hook + SHOW, sdk, after=[tmp_path / "source"]) == (shown, "")


def test_the_import_error_of_a_broken_nni_package_is_raised(sdk, tmp_path):
    real_nni(tmp_path / "source", "raise ValueError('broken')\n")
    code = """
import sys
for _ in range(2):
    try:
        import nni
    except ValueError as error:
        print(error, "nni" in sys.modules)
"""
    assert ran(BASE, code, sdk, after=[tmp_path / "source"]) == ("broken False\nbroken False\n", "")


def test_another_thread_that_imports_nni_waits_until_the_first_import_has_finished(sdk, tmp_path):
    init = """
import threading
def other():
    began.set()
    import nni
    seen.append(nni.last)
seen, began = [], threading.Event()
thread = threading.Thread(target=other)
thread.start()
began.wait()
thread.join(0.2)
last = 1
"""
    real_nni(tmp_path / "source", init)
    code = "import nni; nni.thread.join(); print(nni.seen)"
    assert ran(BASE, code, sdk, after=[tmp_path / "source"]) == ("[1]\n", "")


NAMES = """
import nni, nni.runtime.config
from nni import NoMoreTrialError, get_next_parameter, get_next_parameters, report_final_result, report_intermediate_result
from nni.assessor import Assessor, AssessResult
from nni.recoverable import Recoverable
from nni.tuner import Tuner
from nni.utils import ClassArgsValidator, MetricType, OptimizeMode, extract_scalar_history, extract_scalar_reward, merge_parameter
from nni.utils import NodeType, convert_dict2tuple, split_index
import nni_sdk, nni_sdk.tuner
assert nni is nni_sdk and Tuner is nni_sdk.tuner.Tuner is nni.tuner.Tuner and issubclass(Tuner, Recoverable)
print(nni.runtime.config.get_config_directory())
for name in {modules!r}:
    try:
        __import__(name)
    except ImportError as error:
        print(error.name, "|", error)
for name in "Experiment", "trace", "nothing":
    try:
        getattr(nni, name)
    except (AttributeError, ImportError) as error:
        print(type(error).__name__, "|", error)
"""
ABSENT = (
    "nni.retiarii.nn",
    "nni.nas",
    "nni.compression.pytorch",
    "nni.algorithms.hpo.tpe_tuner",
    "nni.other",
    "nni.experiment",
)


def test_the_names_of_nni_are_available_and_the_error_for_a_missing_name_has_a_remedy(sdk, tmp_path):
    code = NAMES.format(modules=ABSENT)
    printed, error = ran(BASE, code, sdk, NNI_CONFIG_DIR=str(tmp_path / "config"))
    folder, *lines = printed.splitlines()
    assert (folder, error) == (str(tmp_path / "config"), "")
    install = "install the package nni in this Python, which is then used instead"
    no_module = "nni is nni_sdk in this Python, which has no such module"
    no_manager = (
        "cannot import nni_manager.experiment: experiments are a part of the manager, which this Python lacks; "
        "run `pip install 'trial-keeper[manager]'` in this Python"
    )
    assert lines == [
        f"nni.retiarii | cannot import nni.retiarii: {no_module}; architecture search is not a part of trial-keeper; {install}",
        f"nni.nas | cannot import nni.nas: {no_module}; architecture search is not a part of trial-keeper; {install}",
        f"nni.compression | cannot import nni.compression: {no_module}; "
        f"model compression is not a part of trial-keeper; {install}",
        f"nni.algorithms | cannot import nni.algorithms: {no_module}; tuners and assessors run in the manager; "
        f"name one in the experiment file, or {install}",
        f"nni.other | cannot import nni.other: {no_module}; {install}",
        f"nni_manager.experiment | {no_manager}",
        f"ModuleNotFoundError | {no_manager}",
        "ImportError | cannot find nni.trace: nni is nni_sdk in this Python, which has no trace; "
        f"remove its use, or {install}",
        "AttributeError | module 'nni_sdk' has no attribute 'nothing'",
    ]


def test_the_experiment_api_is_available_under_the_names_of_nni(sdk):
    code = (
        "import nni, nni.experiment, nni_manager.experiment as ours\n"
        "from nni import Experiment\n"
        "from nni.experiment import *\n"
        "from nni.experiment.config import ExperimentConfig\n"
        "assert nni.experiment is ours and Experiment is ours.Experiment and ExperimentConfig is ours.ExperimentConfig\n"
        "print(RunMode.__module__)\n"
    )
    assert ran(sys.executable, code, sdk) == ("nni_manager.experiment.experiment\n", "")


TRAIN = """
import nni
from nni.utils import merge_parameter
parameters = merge_parameter({"x": 0.5}, nni.get_next_parameter())
nni.report_intermediate_result(parameters["x"])
nni.report_final_result(parameters["x"])
"""


KINDS = {"plain": {}, "reuse": {"localConfig": {"reuse": True}}}
KINDS["warm"] = KINDS["reuse"] | {"warmImports": ["nni"]}


@pytest.mark.parametrize("kind", KINDS)
def test_trials_that_import_nni_succeed_without_the_package(a_real_experiment, kind):
    experiment = a_real_experiment(TRAIN, **KINDS[kind])
    experiment.start()
    summary = experiment.wait_for_status("DONE", "ERROR")
    assert (summary["status"], summary["counts"]["SUCCEEDED"]) == ("DONE", 4), summary


def test_advisors_use_the_base_class_of_the_sdk_even_if_nni_is_installed(tmp_path):
    """NNI's own base class would connect to NNI's manager when an advisor is created."""
    package = real_nni(tmp_path)
    (package / "runtime").mkdir()
    (package / "runtime" / "__init__.py").touch()
    for name in ("msg_dispatcher_base", "protocol", "tuner_command_channel"):
        (package / "runtime" / f"{name}.py").write_text("WHO = 'real'\n")
    code = (
        "from nni_sdk.aliases import install_import_aliases; install_import_aliases(advisors_are_ours=True)\n"
        "from nni.runtime.msg_dispatcher_base import MsgDispatcherBase\n"
        "from nni.runtime.protocol import send\n"
        "from nni.runtime.tuner_command_channel import WHO\n"
        "import nni.tuner\n"
        "print(MsgDispatcherBase.__module__, send.__module__, WHO, nni.tuner.WHO)"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.stdout, done.stderr) == ("nni_sdk.advisor nni_sdk.advisor real real\n", "")
