"""nnictl update, trial retry and experiment import, with a manager's HTTP API in this process."""

import asyncio
import contextlib
import json
import math
import os
import threading

import pytest
from deadlines import DEADLINE_S
from real_experiment import wait_until
from void_service import Void, an_engine, start

from nni_manager.cli import main
from nni_manager.cli.experiment_commands import to_json
from nni_manager.engine import engine as engine_module
from nni_manager.store.folders import ManagerProcess
from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry
from nni_manager.support.http_server import HttpServer, listen
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.training_services.base import JobEnded
from nni_manager.web.api import ManagerApi
from nni_manager.web.session_auth import SessionAuth
from trial_keeper import __version__

pytestmark = pytest.mark.smoke


class Manager:
    """An engine and its HTTP API in a thread; the engine's training service runs no jobs."""

    def __init__(self, experiment):
        self.experiment = experiment
        self._listener = listen("127.0.0.1", 0, "")
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)
        port, token = self._listener.getsockname()[1], self._session_auth.token
        experiment.folder.write_process(ManagerProcess(os.getpid(), "127.0.0.1", port, __version__, token))

    async def _run(self):
        self._loop, self._must_end = asyncio.get_running_loop(), asyncio.Event()
        self.engine, self.service = an_engine(self.experiment, kind=Void)
        await start(self.engine)
        port = self._listener.getsockname()[1]
        self._session_auth = SessionAuth(
            self.engine.stored.secret, "TESTEXPT", self.engine.folder.ended_sessions
        )
        web = HttpServer(
            ManagerApi(
                self.engine, WebServerOptions(require_token=True), port, self._session_auth, lambda: None
            ).app()
        )
        serving = self._loop.create_task(web.serve(sockets=[self._listener]))
        self._ready.set()
        await self._must_end.wait()
        web.end()
        await serving
        await self.engine.close()

    def lose_every_job(self):
        jobs = [JobEnded(job_id, None, "gone") for job_id in self.engine.experiment.jobs.live]
        for ended in jobs:
            self._loop.call_soon_threadsafe(self.service.on_job_ended, ended)

    @property
    def limits(self):
        return self.engine.experiment.budget.limits

    @property
    def states(self):
        """The states of the stored trials; nnictl reads the same database."""
        with StoreReader(self.experiment.folder.database) as reader:
            return [trial.state.value for trial in reader.trials()]

    def close(self):
        self._loop.call_soon_threadsafe(self._must_end.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(engine_module, "_LAST_KEEPERS_S", 0.01)


@pytest.fixture
def nnictl(capsys):
    def run(*arguments):
        capsys.readouterr()
        code = main.run([str(each) for each in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def manager(a_real_experiment):
    experiment = a_real_experiment("pass\n", trialConcurrency=1, maxTrialNum=1)
    Registry.of_user().add(experiment.folder)
    with experiment.folder.owned(), contextlib.closing(Manager(experiment)) as manager:
        wait_until(lambda: manager.states == ["WAITING"], "the first trial is stored")
        yield manager


def test_nnictl_update_changes_every_limit(manager, nnictl):
    for name, value, field, expected in (
        ("concurrency", 3, "concurrency", 3),
        ("trialnum", 7, "max_trials", 7),
        ("duration", "90m", "max_duration_s", 5400.0),
        ("trialduration", "45s", "max_trial_duration_s", 45.0),
    ):
        code, out, err = nnictl("update", name, "TEST", "--value", value)
        assert (code, err) == (0, "")
        assert out.startswith("INFO: Update ")
        assert out.endswith(" success!\n")
        assert getattr(manager.limits, field) == expected
    assert nnictl("update", "trialnum", "-v", 8)[0] == 0, "without an id the only running experiment is used"
    assert manager.limits.max_trials == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("update", "trialnum", "-v", "0"), "cannot use maxTrialNum: 0 is not valid"),
        (("update", "duration", "-v", "soon"), 'cannot use maxExecDuration: "soon"'),
        (("update", "concurrency", "-v", "two"), "cannot read this command line"),
        (("update", "concurrency"), "cannot run without --value"),
        (("update", "searchspace", "-f", "nothing.json"), "cannot read nothing.json: there is no such file"),
        (("trial", "retry", "-T", "nope"), "cannot find trial 'nope'"),
    ],
)
def test_an_invalid_nnictl_update_prints_a_one_line_error(manager, nnictl, arguments, says):
    before = manager.limits
    code, out, err = nnictl(*arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert says in err
    assert manager.limits == before


def test_nnictl_update_replaces_the_search_space_or_prints_all_errors_of_an_invalid_space(
    manager, nnictl, tmp_path
):
    space = tmp_path / "space.json"
    space.write_text(
        '{"x": {"_type": "unifrm", "_value": [0, 1]},\n "y": {"_type": "uniform", "_value": [1, 0]}}'
    )
    code, _, err = nnictl("update", "searchspace", "--filename", space)
    assert (code, [f"space.json:{line}: cannot " in err for line in (1, 2)]) == (1, [True, True])
    raw = {"x": {"_type": "uniform", "_value": [0, 2]}}
    space.write_text(json.dumps(raw))
    # The limit allows one trial, and this trial has its parameters already, so no trial will use the new search space.
    code, out, err = nnictl("update", "searchspace", "-f", space)
    assert (code, out) == (0, "INFO: Update searchSpace success!\n")
    assert err.startswith("WARNING: no trial will use it: experiment TESTEXPT has had 1 of 1 trials; ")
    assert nnictl("update", "trialnum", "--value", 9)[0] == 0
    assert nnictl("update", "searchspace", "-f", space) == (0, "INFO: Update searchSpace success!\n", "")
    assert manager.engine.config.search_space_raw == raw
    in_yaml = tmp_path / "space.yml"
    in_yaml.write_text("x: {_type: choice, _value: [1, 2]}")
    assert nnictl("update", "searchspace", "-f", in_yaml)[0] == 0
    assert manager.engine.config.search_space_revision == 2


def test_a_failed_trial_is_retried_as_a_new_trial(manager, nnictl):
    (trial,) = manager.engine.experiment.trials.values()
    code, _, err = nnictl("trial", "retry", "-T", trial.trial_id[:3])
    assert (code, "its state is WAITING" in err) == (1, True)
    manager.lose_every_job()
    wait_until(lambda: manager.states == ["FAILED"], "the trial has failed")
    code, out, err = nnictl("trial", "retry", "-T", trial.trial_id)
    assert (code, err) == (0, "")
    assert f"has the parameters of trial {trial.trial_id}" in out
    wait_until(lambda: manager.states == ["FAILED", "WAITING"], "the new trial is stored")


def test_nnictl_import_stores_all_results_or_none(manager, nnictl, tmp_path):
    results = tmp_path / "results.json"
    results.write_text('[{"parameter": {"x": 0.5}, "value": 1},\n {"parameter": {"x": 5}, "value": "?"}]')
    code, _, err = nnictl("experiment", "import", "--filename", results)
    assert (code, err.count("results.json:2: cannot use [1].")) == (1, 1)
    assert manager.engine.reader.imported() == []
    results.write_text('[{"parameter": {"x": 0.5}, "value": 1}]')
    code, out, err = nnictl("experiment", "import", "-f", results)
    assert (code, out) == (0, "INFO: Imported 1 result into experiment TESTEXPT\n")
    assert "the tuner Random uses none of them" in err
    assert len(manager.engine.reader.imported()) == 1


def test_nnictl_import_skips_exported_results_without_a_finite_number(manager, nnictl, tmp_path):
    results = tmp_path / "results.json"
    results.write_text(
        to_json([{"parameter": {"x": 0.5}, "value": value} for value in (math.nan, 1, "text")])
    )
    code, out, err = nnictl("experiment", "import", "-f", results)
    assert (code, out) == (0, "INFO: Imported 1 result into experiment TESTEXPT\n")
    assert "WARNING: skipped 2 of 3 results: they have no finite number to import\n" in err


def test_a_change_without_a_running_manager_is_refused_and_the_error_names_nnictl_resume(
    a_real_experiment, nnictl
):
    experiment = a_real_experiment("pass\n")
    Registry.of_user().add(experiment.folder)
    for arguments in (
        ("update", "trialnum", "TESTEXPT", "-v", "9"),
        ("experiment", "import", "TESTEXPT", "-f", experiment.config_file),
        ("trial", "retry", "TESTEXPT", "-T", "aB3dE"),
    ):
        code, out, err = nnictl(*arguments)
        assert (code, out) == (1, "")
        assert "it is not running; run `nnictl resume TESTEXPT`" in err
