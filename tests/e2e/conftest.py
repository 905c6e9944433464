"""A home with its own OpenPAI, in which tests run nnictl."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from deadlines import DEADLINE_S, scaled_s
from free_ports import free_port_pair
from openpai_home import BIN, CONFIG, TRAIN, environ_of, processes_of
from real_containers import Podman, why_not_here

from nni_manager.local_openpai import daemon


@pytest.fixture(scope="session")
def podman():
    """Podman with a separate store."""
    reason = why_not_here()
    if reason is not None:
        pytest.skip(reason)
    return Podman(Path(sys.prefix) / "containers")


class Home:
    """A home whose OpenPAI runs on a free port. Its tasks are processes, or containers if `sandbox` is
    "podman".
    """

    def __init__(self, path, sandbox, environ):
        self.path = path
        self._environ = environ
        (path / "storage").mkdir()
        start = (
            "start",
            f"--port={free_port_pair()}",
            f"--storage={path}/storage",
            "--virtual-cluster=default=16,100000,0",
            f"--sandbox={sandbox}",
        )
        subprocess.run(
            [BIN / "nnictl", "openpai", *start],
            env=os.environ | environ_of(path) | environ,
            check=True,
            capture_output=True,
            timeout=DEADLINE_S,
        )

    def enter(self, monkeypatch):
        """Set the environment of its user, and write a new folder with an experiment."""
        for name, value in (environ_of(self.path) | self._environ).items():
            monkeypatch.setenv(name, value)
        work = self.path / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        (work / "train.py").write_text(TRAIN)
        (work / "search_space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
        (work / "config.yml").write_text(CONFIG)

    def is_at_rest(self):
        """True if only the service of its OpenPAI runs."""
        running = daemon.running(daemon.StateFolder(self.path / "state" / "trial-keeper" / "openpai"))
        return running is not None and [each.pid for each in processes_of(self.path)] == [running.process.pid]

    def close(self):
        """End its OpenPAI, and kill the processes that a test has left."""
        daemon.stop(daemon.StateFolder(self.path / "state" / "trial-keeper" / "openpai"))
        for process in processes_of(self.path):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture(scope="module")
def homes(tmp_path_factory, request):
    """The homes of this file's tests by sandbox, made at their first use."""
    opened = {}

    def home_with(sandbox):
        if sandbox in opened and not opened[sandbox].is_at_rest():
            opened.pop(sandbox).close()
        if sandbox not in opened:
            podman = request.getfixturevalue("podman").environ if sandbox == "podman" else {}
            names = ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF")
            environ = {name: podman[name] for name in names if name in podman}
            opened[sandbox] = Home(tmp_path_factory.mktemp(sandbox), sandbox, environ)
        return opened[sandbox]

    yield home_with
    for each in opened.values():
        each.close()


@pytest.fixture
def home(homes, monkeypatch, request):
    """The user's home, with an experiment file. It is shared with earlier tests of this file, unless one of them
    has left a process.

    The parameter "podman" chooses the home whose tasks are containers.
    """
    shared = homes(getattr(request, "param", "process"))
    shared.enter(monkeypatch)
    return shared.path


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """Like `home`, but only of this test, in its temporary folder."""
    made = Home(tmp_path, "process", {})
    made.enter(monkeypatch)
    yield tmp_path
    made.close()


@pytest.fixture
def nnictl(request):
    """Runs nnictl in the test's home and waits for its end."""
    home = request.getfixturevalue("own_home" if "own_home" in request.fixturenames else "home")

    def run(*arguments, **replaced):
        for old, new in replaced.get("replace", {}).items():
            config = home / "work" / "config.yml"
            assert old in config.read_text()
            config.write_text(config.read_text().replace(old, new))
        return subprocess.run(
            [BIN / "nnictl", *arguments],
            cwd=home / "work",
            env=environ_of(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled_s(120),
            check=False,
        )

    return run
