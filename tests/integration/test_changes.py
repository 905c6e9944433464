"""Clients of the HTTP API change a running experiment, and a resume keeps the changes. The manager runs in the process of the
test.
"""

import asyncio
import contextlib
import json
import sqlite3

import httpx
import pytest
from attempts import attempt_id, sign_attempt
from deadlines import DEADLINE_S
from scripted_keeper import a_blocked_store
from void_service import Void, an_engine, start

from nni_manager.config.model import ExperimentSpec
from nni_manager.domain.events import (
    AttemptDelivered,
    AttemptEnded,
    AttemptStarted,
    MetricsStored,
    TaskReported,
)
from nni_manager.domain.remarks import RemarksChange
from nni_manager.engine import engine as engine_module
from nni_manager.engine.experiment_commands import FailedPrecondition, TunerFailedOver
from nni_manager.engine.stored_experiment import StoredExperimentReader
from nni_manager.errors import RetryableError, UserError
from nni_manager.store.reader import StoreReader
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.training_services.base import JobEnded, JobPresence
from nni_manager.tuner.base import BaseTuner, Suggestion
from nni_manager.tuner.registry import make_tuner
from nni_manager.web.api import API_ROOT, ManagerApi
from nni_manager.web.auth_middleware import MAX_BODY_BYTES
from nni_manager.web.experiment_routes import MAX_CHANGE_BYTES
from nni_manager.web.session_auth import SessionAuth
from trial_keeper import __version__
from trial_keeper.wire.checkpoints import Checkpoint
from trial_keeper.wire.messages import (
    Ack,
    AttemptKey,
    AttemptOffsets,
    Chunk,
    Hello,
    Shutdown,
    Stream,
    TrialEnded,
    TrialStarted,
)
from trial_keeper.wire.reasons import ExitReason

NOTHING = "pass\n"
GRID = {"x": {"_type": "quniform", "_value": [0, 5, 1]}}
ON_A_GRID = {"tuner": {"builtinTunerName": "GridSearch"}, "space": GRID}


@pytest.fixture(autouse=True)
def no_wait_for_keepers(monkeypatch):
    """The tests have no keepers. Without this fixture, a finished experiment would wait for them before it closes."""
    monkeypatch.setattr(engine_module, "_LAST_KEEPERS_S", 0.01)


class Jobs(Void):
    """A training service that records the submitted and stopped jobs."""

    def __init__(self, on_job_ended, state):
        super().__init__(on_job_ended, state)
        self.job_ids = []
        self.stopped = []
        self.unanswered = set()
        """Jobs that the cluster accepts although submit() fails."""

    async def submit(self, settings):
        self.job_ids.append(settings.job_id)
        if settings.job_id in self.unanswered:
            self.unanswered.remove(settings.job_id)
            raise RetryableError("cannot hear the cluster's answer; wait")

    async def adopt(self, job_id):
        return self.state

    async def stop(self, job_id):
        self.stopped.append(job_id)
        return True

    def lose(self, job_id):
        self.on_job_ended(JobEnded(job_id, None, "the node is gone"))


class Live:
    """An engine, its training service and a client of its HTTP API."""

    def __init__(self, engine, service, client):
        self.engine = engine
        self.service = service
        self._client = client

    async def ask(self, verb, path, status=200, **options):
        answer = await self._client.request(verb, API_ROOT + path, **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def put(self, update_type, status=200, **params):
        path = f"/experiment?update_type={update_type}"
        return await self.ask("PUT", path, status, json={"params": params})

    def trial(self, sequence_id):
        (trial,) = (
            each for each in self.engine.experiment.trials.values() if each.sequence_id == sequence_id
        )
        return trial

    @property
    def state(self):
        return self.engine.experiment.state.value

    async def until(self, is_true):
        while not is_true():
            assert not self.engine.runtime.failed.is_set()
            await asyncio.sleep(0.01)

    async def made(self, count):
        """Wait until there are `count` trials and each has a job; return their values of x."""
        trials = self.engine.experiment.trials
        await self.until(lambda: len(trials) == count and all(trial.job_id for trial in trials.values()))
        return [trial.parameters["x"] for trial in trials.values()]

    def begin(self, sequence_id):
        key = AttemptKey(self.trial(sequence_id).trial_id, attempt_id(0), "main-0")
        self.engine.runtime.post(AttemptStarted(key, 10.0))
        return key

    def finish(self, sequence_id, value="1.0"):
        key = self.begin(sequence_id)
        self.engine.runtime.post(TaskReported(key))
        self.engine.runtime.post(MetricsStored(key, ((True, value),)))
        self.engine.runtime.post(AttemptEnded(TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 11.0, {})))
        self.engine.runtime.post(AttemptDelivered(key))


@contextlib.asynccontextmanager
async def served(engine, service=None):
    session_auth = SessionAuth(b"secret", "TESTEXPT", engine.folder.ended_sessions)
    transport = httpx.ASGITransport(
        ManagerApi(engine, WebServerOptions(require_token=True), 1, session_auth, lambda: None).app()
    )
    headers = {"Authorization": f"Bearer {session_auth.token}"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", headers=headers, trust_env=False
    ) as client:
        yield Live(engine, service, client)


@contextlib.asynccontextmanager
async def a_manager(experiment, presence=JobPresence.RUNNING, make_tuner=make_tuner):
    # A real manager process reads the configuration from the store, so that it includes earlier changes. This manager does too.
    with StoreReader(experiment.folder.database) as reader:
        experiment.config = ExperimentSpec.from_json(reader.experiment().config)
    engine, service = an_engine(experiment, presence, kind=Jobs, make_tuner=make_tuner)
    await start(engine)
    async with served(engine, service) as live:
        try:
            yield live
        finally:
            await engine.close()
            assert not engine.runtime.failed.is_set()


def play(scenario):
    async def bounded():
        await asyncio.wait_for(scenario(), DEADLINE_S)

    asyncio.run(bounded())


# ---- limits


def test_changed_limits_apply_immediately_and_after_a_resume(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=50)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            await live.put("TRIAL_CONCURRENCY", trialConcurrency=3)
            await live.made(3)
            await live.put("MAX_TRIAL_NUM", maxTrialNum=3)
            assert live.state == "NO_MORE_TRIAL"
            await live.put("MAX_EXEC_DURATION", maxExecDuration="2h")
            await live.put("MAX_TRIAL_DURATION", maxTrialDuration=90)
        async with a_manager(experiment) as live:
            params = (await live.ask("GET", "/experiment"))["params"]
            assert [
                params[key]
                for key in ("trialConcurrency", "maxTrialNum", "maxExecDuration", "maxTrialDuration")
            ] == [3, 3, 7200.0, 90.0]
            assert live.engine.experiment.budget.limits.max_trial_duration_s == 90
            assert live.state == "NO_MORE_TRIAL"
            assert params == (await live.ask("GET", "/experiment"))["params"]
            # NNI's own clients send the whole profile with one changed value, so the manager must accept all other fields.
            await live.ask(
                "PUT",
                "/experiment?update_type=MAX_TRIAL_NUM",
                json={"params": params | {"maxTrialNum": 4}, "id": "x"},
            )
            assert live.engine.experiment.budget.limits.max_trials == 4

    play(scenario)


def test_a_done_experiment_runs_again_when_its_trial_limit_is_raised(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            live.finish(0)
            await live.engine.finished.wait()
            assert live.state == "DONE"
            await live.put("MAX_TRIAL_NUM", maxTrialNum=2)
            assert live.state in ("RUNNING", "NO_MORE_TRIAL")
            assert not live.engine.finished.is_set()
            await live.made(2)
            live.finish(1)
            await live.engine.finished.wait()

    play(scenario)


def test_a_trial_is_canceled_when_it_exceeds_max_trial_duration(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1, maxTrialDuration="1s")

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            key = live.begin(0)
            await live.until(lambda: live.service.stopped)
            live.engine.runtime.post(AttemptEnded(TrialEnded(key, ExitReason.SIGNAL, 143, 10.0, 12.0, {})))
            live.engine.runtime.post(AttemptDelivered(key))
            (trial,) = await live.ask("GET", "/trials")
            assert (trial["status"], trial["reason"]) == ("SYS_CANCELED", "time limit")

    play(scenario)


@pytest.mark.parametrize(
    ("verb", "path", "body", "status"),
    [
        ("PUT", "/experiment?update_type=MAX_TRIAL_NUM", {"params": {"maxTrialNum": 0}}, 400),
        ("PUT", "/experiment?update_type=MAX_TRIAL_NUM", {"maxTrialNum": 5}, 400),
        ("PUT", "/experiment?update_type=NOTHING", {"params": {}}, 400),
        ("PUT", "/experiment", {"params": {}}, 400),
        ("PUT", "/experiment?update_type=SEARCH_SPACE", {"params": {"searchSpace": {}}}, 400),
        ("POST", "/trial-jobs", [1], 400),
        ("POST", "/trial-jobs", None, 400),
        ("POST", "/trials/nope/retry", None, 404),
        ("POST", "/experiment/import-data", {}, 400),
    ],
)
def test_an_invalid_request_returns_an_error_and_changes_nothing(a_real_experiment, verb, path, body, status):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            before = await live.ask("GET", "/experiment")
            refusal = await live.ask(verb, path, status, json=body)
            assert refusal["error"].startswith("cannot ")
            after = await live.ask("GET", "/experiment")
            assert after["params"] == before["params"]
            assert len(live.engine.experiment.trials) == 1

    play(scenario)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b'{"x": NaN}', b'{"x": 1e999}', b'{"x": "\\ud800"}', b'{"x": ' + b"9" * 5000 + b"}",
     b'{"x": ' * 5000 + b"1" + b"}" * 5000],
)  # fmt: skip
def test_a_body_that_is_not_strict_json_is_refused(a_real_experiment, content):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        async with a_manager(experiment) as live:
            for verb, path in (
                ("POST", "/trial-jobs"),
                ("POST", "/experiment/import-data"),
                ("PUT", "/experiment"),
            ):
                refusal = await live.ask(verb, path, 400, content=content)
                assert refusal["error"].startswith("cannot read the request body")

    play(scenario)


def test_the_body_size_limit_depends_on_the_endpoint(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        async with a_manager(experiment) as live:
            for path, most in (
                ("/trial-jobs", MAX_BODY_BYTES),
                ("/experiment/import-data", MAX_CHANGE_BYTES),
            ):
                await live.ask("POST", path, 400, content=b" " * most)
                await live.ask("POST", path, 413, content=b" " * (most + 1))

    play(scenario)


def test_a_read_only_view_of_a_stored_experiment_refuses_every_change(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            trial_id = live.trial(0).trial_id
        with contextlib.closing(StoredExperimentReader(experiment.folder)) as view:
            async with served(view) as live:
                for verb, path, body in (
                    ("PUT", "/experiment?update_type=MAX_TRIAL_NUM", {"params": {"maxTrialNum": 5}}),
                    ("POST", "/trial-jobs", {"x": 1}),
                    ("POST", f"/trials/{trial_id}/retry", None),
                    ("POST", "/experiment/import-data", [{"parameter": {"x": 0.5}, "value": 1}]),
                ):
                    refusal = await live.ask(verb, path, 403, json=body)
                    assert "open read-only here" in refusal["error"]
                assert await live.ask("GET", "/experiment/imported-data") == []

    play(scenario)


# ---- the search space


def test_a_changed_search_space_applies_to_new_trials_and_is_kept_by_a_resume(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=2, maxTrialNum=50, **ON_A_GRID)

    async def scenario():
        async with a_manager(experiment) as live:
            assert await live.made(2) == [0, 1]
            live.finish(0)
            await live.made(3)
            # Trials 1 and 2 run during the change of the search space. So the tuner of the new search space receives their
            # results.
            await live.put("SEARCH_SPACE", searchSpace={"x": {"_type": "quniform", "_value": [0, 4, 1]}})
            live.finish(1)
            assert await live.made(4) == [0, 1, 2, 2], "0 and 1 have results; trial 2 is running"
        async with a_manager(experiment) as live:
            live.finish(2)
            assert await live.made(5) == [0, 1, 2, 2, 3]
            live.finish(3)
            assert (await live.made(6))[-1] == 4
            for number in (4, 5):
                live.finish(number)
            await live.engine.finished.wait()
            assert live.state == "DONE"
            # The experiment is DONE because its grid has no further point. The new search space has further points, so the
            # experiment runs again.
            await live.put(
                "SEARCH_SPACE", searchSpace=json.dumps({"x": {"_type": "randint", "_value": [7, 9]}})
            )
            assert live.state == "RUNNING"
            assert (await live.made(8))[-2:] == [7, 8]

    play(scenario)


# ---- trials and results of users


def test_a_customized_trial_updates_the_tuner_and_is_restored_by_a_resume(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=50, **ON_A_GRID)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            created = await live.ask("POST", "/trial-jobs", json={"x": 1.0})
            assert created == {"sequenceId": 1, "trialJobId": live.trial(1).trial_id}
            await live.ask("POST", "/trial-jobs", json={"x": 3.0})
        async with a_manager(experiment) as live:
            assert [trial.is_customized for trial in live.engine.experiment.trials.values()] == [
                False,
                True,
                True,
            ]
            live.finish(0)
            await live.until(lambda: live.service.job_ids == [created["trialJobId"]])
            shown = await live.ask("GET", f"/trials/{created['trialJobId']}")
            assert json.loads(shown["hyperParameters"][0])["parameter_source"] == "customized"
            folder = experiment.folder.workspace.trial(created["trialJobId"])
            assert json.loads(folder.parameter_cfg.read_text())["parameter_source"] == "customized"
            live.finish(1)
            live.finish(2)
            assert (await live.made(4))[-1] == 2, "the grid must skip 1"
        async with a_manager(experiment) as live:
            live.finish(3)
            assert (await live.made(5))[-1] == 4, "the grid must also skip 3"

    play(scenario)


def test_a_retry_of_a_failed_trial_is_a_new_trial_with_the_same_parameters(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            failed = live.trial(0)
            refusal = await live.ask("POST", f"/trials/{failed.trial_id}/retry", 409)
            assert "state is WAITING" in refusal["error"]
            live.service.lose(failed.job_id)
            await live.engine.finished.wait()
            created = await live.ask("POST", f"/trials/{failed.trial_id}/retry")
            again = live.trial(created["sequenceId"])
            assert again.parameters == failed.parameters
            assert (live.state, failed.state.value) == ("NO_MORE_TRIAL", "FAILED")
            live.finish(1)
            await live.engine.finished.wait()
            refusal = await live.ask("POST", f"/trials/{again.trial_id}/retry", 409)
            assert "state is SUCCEEDED" in refusal["error"]
            await live.ask("DELETE", "/experiment", 202)

    play(scenario)


def test_a_customized_trial_is_refused_while_the_experiment_stops(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            live.engine.stop()
            refusal = await live.ask("POST", "/trial-jobs", 409, json={"x": 1})
            assert "nnictl resume" in refusal["error"]
            live.service.lose(live.trial(0).job_id)
            await live.engine.finished.wait()

    play(scenario)


def test_an_import_stores_all_results_or_none_and_a_resume_keeps_the_results(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=50, **ON_A_GRID)
    right = [{"parameter": {"x": float(x)}, "value": x} for x in (1, 2)]

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            wrong = [*right, {"parameter": {"x": 17}, "value": "?"}, {"value": 1}]
            refusal = await live.ask("POST", "/experiment/import-data", 400, json=wrong)
            assert refusal["error"].count("cannot ") == 2
            assert await live.ask("GET", "/experiment/imported-data") == []
            counts = await live.ask("POST", "/experiment/import-data", json=right)
            assert counts == {"imported": 2, "used": 2}
            more = await live.ask(
                "POST",
                "/experiment/import-data",
                json=[{"parameter": {"x": 4.0}, "value": value} for value in (None, '{"default": 1}')],
            )
            # Of the two results, the one with the value None is not imported.
            assert more["imported"] == 1
            live.finish(0)
            assert await live.made(2) == [0, 3]
        async with a_manager(experiment) as live:
            assert await live.ask("GET", "/experiment/imported-data") == [
                *right,
                {"parameter": {"x": 4.0}, "value": {"default": 1}},
            ]
            live.finish(1)
            assert await live.made(3) == [0, 3, 5]

    play(scenario)


class RecordingTuner(BaseTuner):
    """A tuner that proposes the trial's key as x, and records the imported results."""

    def __init__(self, config):
        self.revision = config.search_space_revision
        self.received = []

    def ask(self, trial_key):
        return Suggestion({"x": trial_key}, {})

    def tell(self, trial_key, value):
        pass

    def import_results(self, results):
        self.received += [result.parameters["x"] for result in results]
        return len(results)

    def restore(self, trials):
        pass


def test_results_imported_during_a_search_space_change_reach_the_new_tuner_exactly_once(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=50, **ON_A_GRID)
    tuners = []

    def make(config):
        tuners.append(RecordingTuner(config))
        return tuners[-1]

    async def scenario():
        async with a_manager(experiment, make_tuner=make) as live:
            await live.made(1)
            commits, wider = live.engine.commits, {"x": {"_type": "quniform", "_value": [0, 9, 1]}}
            await asyncio.shield(live.engine.runtime.durable())
            with contextlib.closing(
                sqlite3.connect(experiment.folder.database, isolation_level=None)
            ) as slow:
                # The lock blocks the store until both changes are queued. The store then commits them in one transaction.
                slow.execute("BEGIN IMMEDIATE")
                first = asyncio.ensure_future(live.ask("POST", "/trial-jobs", json={"x": 2}))
                await live.until(lambda: len(live.engine.experiment.trials) == 2)
                changes = [asyncio.ensure_future(live.put("SEARCH_SPACE", searchSpace=wider))]
                await live.until(lambda: live.engine.config.search_space_revision == 1)
                waiting_bytes = commits.waiting_bytes
                results = [{"parameter": {"x": 3.0}, "value": 1.0}]
                changes.append(
                    asyncio.ensure_future(live.ask("POST", "/experiment/import-data", json=results))
                )
                # The import should queue its bytes immediately. If it waits for the change of the search space instead,
                # wait_for() times out after 1 s.
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(live.until(lambda: commits.waiting_bytes > waiting_bytes), 1)
                slow.execute("ROLLBACK")
            await asyncio.gather(first, *changes)
            assert [(tuner.revision, tuner.received.count(3.0)) for tuner in tuners[1:]] == [(1, 1)]
            # Trial 1 has ended, but the history omits its parameters {"x": 2} until the manager has reported its result to the
            # tuner.
            live.finish(1)
            assert [result.parameters for result in live.engine.history.all_known()[0]] == [{"x": 3.0}]
            await live.until(lambda: tuners[-1].received.count(2) == 1)
            assert {"x": 2} in [result.parameters for result in live.engine.history.all_known()[0]]

    play(scenario)


@pytest.mark.parametrize(
    "change",
    [
        lambda commands: commands.propose({"x": 0.5}),
        lambda commands: commands.import_data([{"parameter": {"x": 0.5}, "value": 1.0}]),
        lambda commands: commands.change_remarks(RemarksChange(add=("important",))),
        lambda commands: commands.update("MAX_TRIAL_NUM", {"maxTrialNum": 7}),
    ],
    ids=["a trial", "results", "remarks", "a limit"],
)
def test_a_change_is_durable_before_it_is_confirmed(a_real_experiment, change):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            await asyncio.shield(live.engine.runtime.durable())
            with a_blocked_store(experiment):
                changed = asyncio.ensure_future(change(live.engine.commands))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.shield(changed), 0.5)
                assert not changed.done()
            await changed

    play(scenario)


def test_a_new_search_space_that_the_tuner_refuses_causes_an_error_but_is_stored(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=5, **ON_A_GRID)

    def make(config):
        if config.search_space_revision:
            raise UserError("cannot use the new search space")
        return make_tuner(config)

    async def scenario():
        async with a_manager(experiment, make_tuner=make) as live:
            await live.made(1)
            wider = {"x": {"_type": "quniform", "_value": [0, 9, 1]}}
            with pytest.raises(TunerFailedOver):
                await live.engine.commands.update("SEARCH_SPACE", {"searchSpace": wider})
            assert "cannot use the new search space" in live.engine.experiment.error

    play(scenario)
    with StoreReader(experiment.folder.database) as reader:
        assert ExperimentSpec.from_json(reader.experiment().config).search_space_revision == 1


def test_a_retry_from_a_checkpoint_uses_the_newest_checkpoint_and_is_refused_if_there_is_none(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            failed, commands = live.trial(0), live.engine.commands
            live.service.lose(failed.job_id)
            await live.engine.finished.wait()
            with pytest.raises(FailedPrecondition, match="no signed checkpoint"):
                await commands.retry(failed, from_checkpoint=True)
            assert len(live.engine.experiment.trials) == 1
            newest, older = (
                Checkpoint(trial_id, attempt_id(0), "main-0", "000001", "", "", 1)
                for trial_id in (failed.trial_id, "older")
            )
            commands.find_checkpoints = lambda trial: [newest, older]
            again = await commands.retry(failed, from_checkpoint=True)
            assert (again.parameters, again.continues) == (failed.parameters, failed.trial_id)
            live.service.lose(again.job_id)
            await live.engine.finished.wait()

    play(scenario)


# ---- jobs that the cluster loses


def test_a_lost_job_is_submitted_again_and_a_resume_keeps_the_number_of_retries(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1, maxTrialRetry=2)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.until(lambda: live.service.job_ids)
            trial = live.trial(0)
            live.service.lose(trial.trial_id)
            await live.until(lambda: len(live.service.job_ids) == 2)
            assert live.service.job_ids == [trial.trial_id, f"{trial.trial_id}-1"]
            # The keeper of the second job starts attempt 0 of the trial. Then the cluster loses this job too.
            sign_attempt(
                experiment.folder, AttemptKey(trial.trial_id, attempt_id(0), "main-0"), f"{trial.trial_id}-1"
            )
            live.begin(0)
            live.service.lose(f"{trial.trial_id}-1")
            await live.until(lambda: len(live.service.job_ids) == 3)
            (shown,) = await live.ask("GET", "/trials")
            assert (shown["state"], shown["retries"], shown["attempt"]) == ("WAITING", 2, None)
            assert "retry 2 of 2" in shown["warning"]
        async with a_manager(experiment, JobPresence.UNKNOWN) as live:
            trial = live.trial(0)
            lost = [(int(each.key.attempt_id), each.is_lost) for each in trial.registered.registered]
            assert (trial.retries, lost) == (2, [(0, True)])
            # The previous manager planned the third job, but closed before it submitted the job. The next manager submits the
            # job, and does not count this as a further retry.
            await live.until(lambda: live.service.job_ids == [f"{trial.trial_id}-2"])
            live.begin(0)
            assert trial.state.value == "WAITING", "the attempt of a lost job must be ignored"
            live.service.lose(trial.job_id)
            await live.engine.finished.wait()
            assert (trial.state.value, trial.run.reason) == ("FAILED", ExitReason.KEEPER_LOST)

    play(scenario)


def test_an_ended_job_counts_as_disconnected_while_the_manager_reads_the_files_of_its_trials(
    a_real_experiment,
):
    """The prefetched trials of a connected job are given to idle jobs, although the files may contain results of these trials."""
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.until(lambda: live.service.job_ids)
            job_id, admission = live.trial(0).job_id, live.engine.admission
            job = live.engine.experiment.jobs.live[job_id]
            hello = Hello(__version__, experiment.folder.experiment_id, job_id, "main-0", ())
            admission.admit(hello, job_id, admission.token(job_id))
            await live.until(lambda: job.is_linked)
            may_read = asyncio.Event()
            live.service.reap_orphans = lambda *_: may_read.wait()
            live.service.lose(job_id)
            await live.until(lambda: not job.is_linked)
            assert live.trial(0).state.value == "WAITING"
            may_read.set()
            await live.engine.finished.wait()

    play(scenario)


def test_a_keeper_receives_close_and_shutdown_messages_if_its_job_is_reported_as_lost(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1, maxTrialRetry=1)

    def said(session):
        return [session.outgoing.get_nowait() for _ in range(session.outgoing.qsize())]

    async def scenario():
        async with a_manager(experiment) as live:
            await live.until(lambda: live.service.job_ids)
            trial, admission = live.trial(0), live.engine.admission
            job_id, key = trial.job_id, AttemptKey(trial.trial_id, attempt_id(0), "main-0")

            def hello(*attempts):
                said_first = Hello(__version__, experiment.folder.experiment_id, job_id, "main-0", attempts)
                return admission.admit(said_first, job_id, admission.token(job_id))

            session = hello()
            session.receive(TrialStarted(key, 10.0))
            session.receive(Chunk(key, Stream.KEEPER, 0, b"begun\n"))
            sign_attempt(experiment.folder, key)
            said(session)
            live.service.lose(job_id)
            await live.until(lambda: len(live.service.job_ids) == 2)
            closed = [
                each.attempt.key for each in said(session) if isinstance(each, Ack) and each.attempt.closed
            ]
            assert closed == [key]
            session.receive(Chunk(key, Stream.KEEPER, 6, b"stopped\n"))
            session.receive(TrialEnded(key, ExitReason.JOB_LOST, 143, 10.0, 11.0, {}))
            (word,) = said(session)
            assert word.attempt == AttemptOffsets(key, {}, closed=True)
            session.closed()
            # When the keeper connects again, the manager reports the attempt as closed and sends a Shutdown.
            welcome, leave = said(hello(key))
            assert (welcome.attempts, type(leave)) == ((AttemptOffsets(key, {}, closed=True),), Shutdown)
            assert (trial.state.value, trial.retries, trial.run.attempt) == ("WAITING", 1, None)
            live.service.lose(trial.job_id)
            await live.engine.finished.wait()

    play(scenario)


def task_names():
    return [task.get_coro().__name__ for task in asyncio.all_tasks()]


def test_exactly_one_job_replaces_a_job_that_is_lost_during_its_submission(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1, maxTrialRetry=1)

    async def scenario():
        async with a_manager(experiment) as live:
            await live.made(1)
            trial_id = live.trial(0).trial_id
            live.service.unanswered.add(trial_id)
            await live.until(lambda: live.service.job_ids)
            live.service.lose(trial_id)
            await live.until(lambda: len(live.service.job_ids) == 2)
            await live.until(lambda: "_submit" not in task_names())
            assert live.service.job_ids == [trial_id, f"{trial_id}-1"]
            live.service.lose(f"{trial_id}-1")
            await live.engine.finished.wait()

    play(scenario)
