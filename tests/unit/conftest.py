"""Fixtures of the tests that start no process."""

import pytest


@pytest.fixture
def nnictl(capsys):
    """Runs a command line; returns exit code, stdout and stderr."""

    def run(*arguments):
        from nni_manager.cli import main  # few of these tests need it

        code = main.run(arguments)
        return code, *capsys.readouterr()

    return run
