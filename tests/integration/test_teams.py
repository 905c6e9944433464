"""Trials with several tasks: each task has a real keeper, and the manager is real."""

import asyncio

import pytest
from attempts import metrics_of
from real_experiment import a_manager_here, until
from team_service import TeamService

from nni_manager.domain.admission_errors import NotAccepting
from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.domain.events import DispatchTrial
from nni_manager.store.reader import StoreReader

ONE_WORKER = Completion((TaskRole("worker", 1, 1, 1),))
TEAM = Completion((TaskRole("ps", 1, 1, -1), TaskRole("worker", 2, 1, 2)))
TRAIN = """
import os, signal, sys, time
import nni_sdk as nni
nni.get_next_parameter()
if os.environ["NNI_TRIAL_SEQ_ID"] == "{stopped}":
    signal.pause()  # until the manager stops the trial
role, index = os.environ["PAI_CURRENT_TASK_ROLE_NAME"], int(os.environ["PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX"])
if role == "ps":
    signal.pause()  # runs until the completion policy stops it
if index == 1:
    # The second reporter waits until metrics of the first one are stored.
    while not os.path.exists(os.environ["NNI_TRIAL_JOB_ID"] + ".heard"):
        time.sleep(0.01)
nni.report_intermediate_result(index)
nni.report_final_result(index)
{more}
"""


def run(experiment, more, *, reuse, team=TEAM, meddle=None, stopped=None):
    """Run the experiment until it ends; return its trials. `meddle` is called with the engine and the cluster during the run.
    `stopped`: the number of a trial that runs until the manager stops it.
    """
    (experiment.code / "train.py").write_text(TRAIN.format(more=more, stopped=stopped))

    services = []

    def make(on_job_ended):
        services.append(TeamService(team, str(experiment.code), on_job_ended))
        return services[-1]

    async def scenario():
        async with a_manager_here(experiment, make) as engine:
            told = asyncio.ensure_future(release_second_reporters(experiment, engine))
            if meddle is not None:
                await meddle(engine, services[-1])
            await until(lambda: engine.experiment.state.is_terminal, "the experiment is over")
            told.cancel()
            return list(engine.experiment.trials.values())

    return asyncio.run(scenario())


async def release_second_reporters(experiment, engine):
    """Release the second worker of a trial when the metrics of the first worker are stored."""
    while True:
        for trial in engine.experiment.trials.values():
            if trial.run.reporter is not None:
                (experiment.code / f"{trial.trial_id}.heard").touch()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_trial_uses_the_metrics_of_one_task_and_ends_according_to_the_completion_policy(
    a_real_experiment, reuse
):
    experiment = a_real_experiment("", maxTrialNum=3, trialConcurrency=1, localConfig={"reuse": reuse})
    trials = run(experiment, "", reuse=reuse)
    assert [trial.state.value for trial in trials] == ["SUCCEEDED"] * 3
    for trial in trials:
        assert (trial.run.reporter, trial.run.value) == ("worker-0", 0.0)
        assert "metrics of task worker-1 are ignored" in trial.warning
        with StoreReader(experiment.folder.database) as reader:
            assert {row.task for row in metrics_of(reader, trial.trial_id)} == {"worker-0"}
            assert len(metrics_of(reader, trial.trial_id)) == 2
    if reuse:
        assert {trial.job_id for trial in trials} == {"env-0"}
    else:
        assert len({trial.job_id for trial in trials}) == 3


def test_a_trial_fails_if_its_worker_fails_and_the_reused_job_then_runs_the_next_trial(a_real_experiment):
    experiment = a_real_experiment("", maxTrialNum=2, trialConcurrency=1, localConfig={"reuse": True})
    more = 'sys.exit(3 if index == 1 and os.environ["NNI_TRIAL_SEQ_ID"] == "0" else 0)'
    trials = run(experiment, more, reuse=True)
    assert [(trial.state.value, trial.run.exit_code) for trial in trials] == [("FAILED", 3), ("SUCCEEDED", 0)]
    assert {trial.job_id for trial in trials} == {"env-0"}
    attempts = experiment.folder.workspace.trial(trials[0].trial_id).attempts
    assert len(list(attempts.glob("*/ps-0/exit.json"))) == 1


def test_a_trial_ends_with_its_last_task_if_min_succeeded_instances_is_not_set(
    a_real_experiment,
):
    experiment = a_real_experiment("", maxTrialNum=3, trialConcurrency=1, localConfig={"reuse": True})
    trials = run(
        experiment, "time.sleep(0.3 * index)", reuse=True, team=Completion((TaskRole("worker", 2, 1, -1),))
    )
    assert [(trial.state.value, trial.run.value) for trial in trials] == [("SUCCEEDED", 0.0)] * 3
    assert {trial.job_id for trial in trials} == {"env-0"}
    assert all(trial.run.ended_at_s - trial.run.started_at_s >= 0.3 for trial in trials)


def test_a_task_exits_with_0_if_it_connects_after_the_trial_has_ended(a_real_experiment):
    """With another exit code, the cluster's policy would fail the job although the trial has succeeded."""
    experiment = a_real_experiment("", maxTrialNum=1, trialConcurrency=1, localConfig={"reuse": False})
    codes = []

    async def meddle(engine, service):
        trials, admit = engine.experiment.trials, engine.admission.admit

        def admit_ps_late(hello, job_id, token):
            is_early = not any(trial.state.is_terminal for trial in trials.values())
            if hello.task == "ps-0" and (is_early or not hello.attempts):
                raise NotAccepting()
            return admit(hello, job_id, token)

        engine.admission.admit = admit_ps_late
        await until(lambda: service.keepers, "the job is submitted")
        for keeper in (*service.keepers.values(),)[0].values():
            codes.append(await asyncio.to_thread(keeper.wait))

    (trial,) = run(experiment, "", reuse=False, meddle=meddle)
    assert (trial.state.value, codes) == ("SUCCEEDED", [0, 0, 0])


def test_a_trial_succeeds_if_the_completion_policy_tolerates_the_loss_of_a_killed_keeper(a_real_experiment):
    experiment = a_real_experiment("", maxTrialNum=1, trialConcurrency=1, localConfig={"reuse": False})
    gate = experiment.code / "gate"

    async def meddle(engine, service):
        def is_reported():
            trials = list(engine.experiment.trials.values())
            return trials and trials[0].run.final is not None and "worker-2" in trials[0].attempts

        await until(is_reported, "the trial has a final result, and its third task runs")
        (keepers,) = service.keepers.values()
        keepers["worker-2"].kill()
        gate.touch()

    more = f"while index == 2 or not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)"
    team = Completion((TaskRole("worker", 3, 2, -1),))
    (trial,) = run(experiment, more, reuse=False, team=team, meddle=meddle)
    assert (trial.state.value, trial.run.value) == ("SUCCEEDED", float(trial.run.reporter[-1]))
    assert "lost without a report of their end: worker-2" in trial.warning


@pytest.mark.parametrize("task", ["worker-0", "ps-0"])
def test_a_task_of_a_trial_gets_a_new_attempt_if_the_keeper_of_the_task_is_replaced(a_real_experiment, task):
    experiment = a_real_experiment("", maxTrialNum=2, trialConcurrency=1, localConfig={"reuse": True})
    gate = experiment.code / "gate"

    async def meddle(engine, service):
        await until(
            lambda: any(trial.warning for trial in engine.experiment.trials.values()), "both tasks report"
        )
        (trial,) = engine.experiment.trials.values()
        before = trial.attempts[task].key
        service.replace_keeper(trial.job_id, task)
        await until(lambda: trial.attempts[task].key != before, "a new attempt starts")
        gate.touch()

    more = f"while not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)"
    trials = run(experiment, more, reuse=True, meddle=meddle)
    assert [trial.state.value for trial in trials] == ["SUCCEEDED"] * 2
    assert {trial.job_id for trial in trials} == {"env-0"}
    # If `ps-0` is replaced, the stored metrics of `worker-0` still count. If `worker-0` is replaced, its new attempt reports its
    # metrics again.
    first = trials[0]
    assert (first.run.reporter, first.run.value, first.run.attempt) == (
        "worker-0",
        0.0,
        1 if task == "worker-0" else 0,
    )
    with StoreReader(experiment.folder.database) as reader:
        assert len(metrics_of(reader, first.trial_id)) == 2


def test_the_job_does_not_fail_if_a_trial_is_stopped_during_its_dispatch(a_real_experiment):
    experiment = a_real_experiment("", maxTrialNum=3, trialConcurrency=1, localConfig={"reuse": True})

    async def meddle(engine, service):
        perform = engine._perform

        def perform_and_stop(effect):
            perform(effect)
            if isinstance(effect, DispatchTrial) and effect.trial.sequence_id == 1:
                engine.stop_trial(effect.trial.trial_id)

        engine._perform = perform_and_stop

    trials = run(experiment, "", reuse=True, team=ONE_WORKER, meddle=meddle, stopped=1)
    assert [trial.state.value for trial in trials] == ["SUCCEEDED", "USER_CANCELED", "SUCCEEDED"]
    assert {trial.job_id for trial in trials} == {"env-0"}


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_the_manager_reads_the_end_of_a_trial_from_the_workspace_if_no_keeper_reports_the_end(
    a_real_experiment, how
):
    """The keeper of the only task is replaced. In one case the trial still runs. In the other, the trial has ended, but only the
    workspace contains its end.
    """
    experiment = a_real_experiment("", maxTrialNum=1, trialConcurrency=1, localConfig={"reuse": True})

    async def meddle(engine, service):
        await until(
            lambda: any(trial.run.reporter for trial in engine.experiment.trials.values()),
            "the trial reports",
        )
        (trial,) = engine.experiment.trials.values()
        if how == "ended":
            engine.ingest.end = lambda ended, end=engine.ingest.end: None if not taken else end(ended)
            (experiment.code / "gate").touch()
            attempts = experiment.folder.workspace.trial(trial.trial_id).attempts
            await until(lambda: list(attempts.glob("*/worker-0/exit.json")), "the trial ends")
        taken.append(True)
        service.replace_keeper(trial.job_id, "worker-0")
        (experiment.code / "gate").touch()

    taken = []
    more = "while not os.path.exists('gate'):\n    time.sleep(0.01)"
    (trial,) = run(experiment, more, reuse=True, team=ONE_WORKER, meddle=meddle)
    assert (trial.state.value, trial.run.value, trial.run.attempt) == (
        "SUCCEEDED",
        0.0,
        0 if how == "ended" else 1,
    )
