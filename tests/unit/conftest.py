"""Fixtures of the tests that start no process."""

import socket

import pytest
from simulated_keeper import SimulatedKeeper
from stored_experiments import experiments_in


@pytest.fixture
def nnictl(capsys):
    """Return a function that runs nnictl with the given arguments. It returns the exit code, stdout and stderr."""

    def run(*arguments):
        # Only tests that call nnictl need this module, so the others do not import it.
        from nni_manager.cli import main

        code = main.run(arguments)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def state_home(tmp_path, monkeypatch):
    """The home of a user without experiments."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    # COLUMNS may contain the width of the terminal in which the tests run. The output of nnictl must not depend on it here.
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def an_experiment(tmp_path, state_home):
    """Yield a function that creates a stored experiment. If it has a port, this process owns the experiment until the test
    ends.
    """
    with experiments_in(tmp_path) as make:
        yield make


@pytest.fixture
def unused_port():
    with socket.socket() as probe:
        # The socket is bound, so no other process gets the port. It does not listen, so connections to the port fail.
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


@pytest.fixture
def simulated() -> SimulatedKeeper:
    return SimulatedKeeper()
