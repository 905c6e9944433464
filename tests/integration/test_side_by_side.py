"""trial-keeper is installed together with NNI's package, which also installs a command nnictl."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import DEADLINE_S

import trial_keeper
from trial_keeper import __version__
from trial_keeper.programs import foreign_nnictl

BIN = Path(sys.executable).parent
# pip writes this script as the command nnictl of nni 2.10 and 3.0.
OF_NNI = """\
#!/usr/bin/python3
import sys
from nni.tools.nnictl.nnictl import parse_args
if __name__ == '__main__':
    sys.exit(parse_args())
"""


@pytest.fixture
def foreign(tmp_path):
    """A folder with the nnictl command of NNI's package."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nnictl").write_text(OF_NNI)
    (folder / "nnictl").chmod(0o755)
    return folder


def run(*command, **environ):
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_a_foreign_nnictl_is_detected_only_if_it_comes_first_on_the_path(foreign, tmp_path):
    assert foreign_nnictl(f"{foreign}:{BIN}") == str(foreign / "nnictl")
    assert foreign_nnictl(f"{BIN}:{foreign}") is None
    assert foreign_nnictl(str(tmp_path)) is None


def test_the_doctor_warns_about_a_foreign_nnictl(foreign):
    done = run(BIN / "trial-keeper", "doctor", PATH=f"{foreign}:{os.environ['PATH']}")
    (line,) = (line for line in done.stdout.splitlines() if "nnictl" in line.split()[1:2])
    assert line.split(maxsplit=2) == [
        "WARN",
        "nnictl",
        f"{foreign}/nnictl, which a shell finds first, is another package's; write `trial-keeper ctl` for `nnictl`",
    ]


def test_the_manager_log_warns_about_a_foreign_nnictl(foreign, a_real_experiment, monkeypatch):
    monkeypatch.setenv("PATH", f"{foreign}:{os.environ['PATH']}")
    experiment = a_real_experiment("import nni_sdk; nni_sdk.report_final_result(1)\n", maxTrialNum=1)
    experiment.start()
    experiment.wait_for_status("DONE")
    assert (
        f"{foreign}/nnictl, which a shell finds first, is another"
        in experiment.folder.manager_log.read_text()
    )


@pytest.mark.parametrize(
    "command", [("trial-keeper", "ctl"), ("python", "-m", "nni_manager.cli")], ids=" ".join
)
def test_trial_keeper_ctl_and_python_m_behave_like_the_nnictl_command(command, tmp_path):
    ours = [BIN / command[0], *command[1:]]
    assert run(*ours, "--version").stdout == run(BIN / "nnictl", "--version").stdout
    assert __version__ in run(*ours, "--version").stdout
    listed = run(*ours, "experiment", "list", "--json", HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path))
    assert (listed.returncode, listed.stdout, listed.stderr) == (0, "[]\n", "")
    wrong = run(*ours, "experiment", "lst")
    assert (wrong.returncode, wrong.stderr.splitlines()) == (
        1,
        run(BIN / "nnictl", "experiment", "lst").stderr.splitlines(),
    )


def test_trial_keeper_ctl_without_the_manager_package_names_the_package_to_install(tmp_path):
    """Only the keeper is on the path, as in a keeper's image."""
    (tmp_path / "trial_keeper").symlink_to(Path(trial_keeper.__file__).parent)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    code = (
        f"import sys; sys.path.append({packages!r}); sys.argv = ['trial-keeper', 'ctl', 'create']; "
        "from trial_keeper.__main__ import main; sys.exit(main())"
    )
    done = run(sys._base_executable, "-c", code, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (100, "")
    assert done.stderr == (
        "cannot run nnictl: this Python lacks the manager; run `pip install 'trial-keeper[manager]'` in this Python\n"
    )
