"""A home with its own OpenPAI, in which tests run nnictl."""

import contextlib
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


@pytest.fixture
def home(tmp_path, monkeypatch, request):
    """A home whose OpenPAI runs on a free port. Processes that a test starts there are killed after the test.

    Its tasks are processes, or containers with the parameter "podman".
    """
    sandbox = getattr(request, "param", "process")
    if sandbox == "podman":
        environ = request.getfixturevalue("podman").environ
        for name in ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF"):
            monkeypatch.setenv(name, environ[name])
    (tmp_path / "storage").mkdir()
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(TRAIN)
    (work / "search_space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
    (work / "config.yml").write_text(CONFIG)
    for name, value in environ_of(tmp_path).items():
        monkeypatch.setenv(name, value)
    port = free_port_pair()
    start = (
        "start",
        f"--port={port}",
        f"--storage={tmp_path}/storage",
        "--virtual-cluster=default=16,100000,0",
        f"--sandbox={sandbox}",
    )
    subprocess.run([BIN / "nnictl", "openpai", *start], check=True, capture_output=True, timeout=DEADLINE_S)
    yield tmp_path
    daemon.stop(daemon.StateFolder.of_user())
    for process in processes_of(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture
def nnictl(home):
    """Runs nnictl and waits for its end."""

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
