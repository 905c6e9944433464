"""A home folder with an OpenPAI of its own. Tests run nnictl in this home."""

import subprocess

import pytest
from deadlines import scaled_s
from fake_manager import Site
from openpai_home import BIN, OpenPaiHome, environ_of
from real_containers import Container, podman_of_tests, why_not_here


@pytest.fixture(scope="session")
def podman():
    """Podman with a separate store."""
    reason = why_not_here()
    if reason is not None:
        pytest.skip(reason)
    return podman_of_tests()


@pytest.fixture
def a_container(podman, tmp_path):
    """Starts containers, and removes them."""
    started = []

    def start(*arguments):
        started.append(Container(podman, tmp_path, *arguments))
        return started[-1]

    yield start
    for container in started:
        container.remove()


@pytest.fixture
def site(tmp_path):
    """The shared storage with one experiment, whose manager listens on this machine."""
    site = Site(tmp_path / "storage")
    site.manager.start()
    yield site
    site.close()


@pytest.fixture(scope="module")
def homes(tmp_path_factory, request):
    """Returns the home for a sandbox type. It is created at its first use, and all tests of the file share it."""
    opened = {}

    def home_with(sandbox):
        if sandbox in opened and not opened[sandbox].is_at_rest():
            opened.pop(sandbox).close()
        if sandbox not in opened:
            podman = request.getfixturevalue("podman").environ if sandbox == "podman" else {}
            names = ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF")
            environ = {name: podman[name] for name in names if name in podman}
            opened[sandbox] = OpenPaiHome(tmp_path_factory.mktemp(sandbox), sandbox, environ)
        return opened[sandbox]

    yield home_with
    for each in opened.values():
        each.close()


@pytest.fixture
def home(homes, monkeypatch, request):
    """The user's home, with an experiment file.

    All tests of the file share the home; it is replaced if a test has left a process in it. With the parameter "podman", the
    tasks of the home's OpenPAI are containers.
    """
    shared = homes(getattr(request, "param", "process"))
    shared.enter(monkeypatch)
    return shared.path


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """Like `home`, but not shared with other tests, and in the temporary folder of the test."""
    made = OpenPaiHome(tmp_path, "process", {})
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
