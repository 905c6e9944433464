"""The shell commands that install a bundled keeper on a remote machine. The tests run them on this machine."""

import dataclasses
import subprocess
import sys
import threading

import pytest
from deadlines import DEADLINE_S
from keeper_bundles import FROZEN, MACHINE, make_bundle

from nni_manager.training_services.remote import render
from nni_manager.training_services.remote.section import RemoteMachine

OF_THIS_PYTHON = f"cp{sys.version_info[0]}{sys.version_info[1]}-{MACHINE}"
TOOLS = ("b2sum", "cat", "chmod", "cut", "mkdir", "mktemp", "mv", "rm", "sha256sum", "tar", "uname")


class Machine:
    """A simulated machine: its home folder, and a folder with its programs."""

    def __init__(self, folder, bundle):
        self.bundle, self.settings = bundle, RemoteMachine("machine")
        self.home, self.programs = folder / "home", folder / "bin"
        self.home.mkdir()
        self.programs.mkdir()
        for tool in TOOLS:
            (self.programs / tool).symlink_to(f"/usr/bin/{tool}")
        (self.programs / "bash").symlink_to("/bin/bash")
        self.kept = self.home / ".cache" / "trial-keeper" / "bundle"

    def add_python(self):
        (self.programs / "python3").symlink_to(sys.executable)

    def run(self, command, body=b""):
        environ = {"HOME": str(self.home), "PATH": str(self.programs)}
        return subprocess.run(
            ["/bin/sh", "-c", command], env=environ, input=body, capture_output=True, timeout=DEADLINE_S
        )

    def choice(self):
        done = self.run(render.bundle_probe(self.settings, self.bundle))
        assert (done.stderr, done.returncode) == (b"", 0)
        return done.stdout.decode().split()

    def install(self, name, body=None):
        command = render.bundle_installation(self.settings, self.bundle, name)
        return self.run(command, self.bundle.archive(name).read_bytes() if body is None else body)

    def server(self, name):
        """Start the server with the keeper of this archive; return the output of the command."""
        folder = render.bundle_folder(self.bundle.digests[name])
        return self.run(render.server_command(self.settings, folder)).stdout.decode()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path, make_bundle(tmp_path / "installed", (OF_THIS_PYTHON, FROZEN)))


@pytest.mark.parametrize("has_python", [True, False])
def test_the_archive_that_matches_the_machine_is_unpacked_and_its_keeper_starts(machine, has_python):
    name, kind = (OF_THIS_PYTHON, "1 1") if has_python else (FROZEN, "frozen")
    if has_python:
        machine.add_python()
    assert machine.choice() == [name, "no"]
    assert machine.install(name).returncode == 0
    assert machine.choice() == [name, "yes"]
    assert machine.server(name) == f"{name} {kind} serve-machine\n"
    assert [each.name for each in machine.kept.iterdir()] == [machine.bundle.digests[name][:16]]


def test_a_bundled_keeper_runs_after_its_python_has_moved(machine):
    """An environment in pythonPath was replaced, or another machine with the same home has Python at another path."""
    machine.add_python()
    machine.install(OF_THIS_PYTHON)
    moved = machine.home / "moved"
    moved.mkdir()
    (machine.programs / "python3").rename(moved / "python3")
    machine.settings = dataclasses.replace(machine.settings, python_path=str(moved))
    assert machine.choice() == [OF_THIS_PYTHON, "yes"]
    assert machine.server(OF_THIS_PYTHON) == f"{OF_THIS_PYTHON} 1 1 serve-machine\n"


def test_a_bundled_keeper_is_preferred_to_an_installed_keeper_of_another_version(machine):
    (machine.programs / "trial-keeper").write_text("#!/bin/bash\necho another\n")
    (machine.programs / "trial-keeper").chmod(0o755)
    machine.settings = dataclasses.replace(machine.settings, python_path=str(machine.programs))
    machine.install(FROZEN)
    assert machine.server(FROZEN) == f"{FROZEN} frozen serve-machine\n"


def test_no_archive_is_chosen_if_none_matches_the_machine(machine):
    machine.bundle = dataclasses.replace(machine.bundle, digests={})
    assert machine.choice() == []


def test_an_archive_that_was_truncated_during_its_transfer_is_not_unpacked(machine):
    done = machine.install(FROZEN, machine.bundle.archive(FROZEN).read_bytes()[:-1])
    assert done.returncode == 1
    assert b"the archive was damaged on the way" in done.stderr
    assert list(machine.kept.iterdir()) == []


def test_a_bundled_keeper_that_cannot_run_on_the_machine_is_removed(machine):
    (machine.programs / "tar").unlink()
    (machine.programs / "tar").write_text(
        '#!/bin/bash\nwhile [ $# -gt 1 ]; do shift; done; printf "#!/bin/bash\\nexit 1\\n" > "$1/trial-keeper"\n'
        'chmod 755 "$1/trial-keeper"\n'
    )
    (machine.programs / "tar").chmod(0o755)
    assert machine.install(FROZEN).returncode == 1
    assert list(machine.kept.iterdir()) == []


def test_several_managers_can_install_the_same_archive_at_the_same_time(machine):
    done = []
    installs = [threading.Thread(target=lambda: done.append(machine.install(FROZEN))) for _ in range(4)]
    for each in installs:
        each.start()
    for each in installs:
        each.join()
    assert [each.returncode for each in done] == [0] * 4
    assert [each.name for each in machine.kept.iterdir()] == [machine.bundle.digests[FROZEN][:16]]
    assert machine.server(FROZEN) == f"{FROZEN} frozen serve-machine\n"


def test_without_a_bundle_the_server_command_exits_with_the_code_for_a_missing_keeper(machine):
    assert machine.run(render.server_command(machine.settings)).returncode == render.NO_KEEPER
