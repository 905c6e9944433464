"""Trials in several tasks: real keepers, one for each, and the real manager."""

import asyncio
import os

import pytest
from real_experiment import a_manager_here, until
from team_service import TeamService

from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.store.store import StoreReader

pytestmark = pytest.mark.timeout(120)

TEAM = Completion((TaskRole("ps", 1, 1, -1), TaskRole("worker", 2, 1, 2)))
TRAIN = """
import os, signal, sys, time
import nni_sdk as nni
nni.get_next_parameter()
role, index = os.environ["PAI_CURRENT_TASK_ROLE_NAME"], int(os.environ["PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX"])
if role == "ps":
    signal.pause()  # it serves for ever: the policy ends it
if index == 1:
    # The second reporter reports once the first one has been heard.
    while not os.path.exists(os.environ["NNI_TRIAL_JOB_ID"] + ".heard"):
        time.sleep(0.01)
nni.report_intermediate_result(index)
nni.report_final_result(index)
{more}
"""


def run(experiment, more, *, reuse, watch=None):
    """Play the experiment to its end; the engine."""
    (experiment.code / "train.py").write_text(TRAIN.format(more=more))

    def make(on_job_ended):
        return TeamService(TEAM, str(experiment.code), on_job_ended)

    async def scenario():
        async with a_manager_here(experiment, make) as engine:
            told = asyncio.ensure_future(tell_second_reporters(experiment, engine))
            await until(lambda: engine.experiment.state.is_over, "the experiment is over")
            told.cancel()
            return list(engine.experiment.trials.values())

    return asyncio.run(scenario())


async def tell_second_reporters(experiment, engine):
    """Let the second worker of a trial go on when the first one's metrics are stored."""
    while True:
        for trial in engine.experiment.trials.values():
            if trial.reporter is not None:
                (experiment.code / f"{trial.trial_id}.heard").touch()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("reuse", [False, True])
def test_the_first_reporter_owns_the_metrics_and_the_policy_ends_the_trial(a_real_experiment, reuse):
    experiment = a_real_experiment("", maxTrialNum=3, trialConcurrency=1, localConfig={"reuse": reuse})
    trials = run(experiment, "", reuse=reuse)
    assert [trial.state.value for trial in trials] == ["SUCCEEDED"] * 3
    for trial in trials:
        assert (trial.reporter, trial.value) == ("worker-0", 0.0)
        assert "task worker-1 reports metrics as well" in trial.warning
        with StoreReader(experiment.folder.database) as reader:
            assert {row.task for row in reader.metrics_of(trial.trial_id)} == {"worker-0"}
            assert len(reader.metrics_of(trial.trial_id)) == 2
    if reuse:
        assert {trial.job_id for trial in trials} == {"env-0"}
    else:
        assert len({trial.job_id for trial in trials}) == 3


def test_one_failing_worker_fails_the_trial_and_the_next_one_runs_in_the_same_job(a_real_experiment):
    experiment = a_real_experiment("", maxTrialNum=2, trialConcurrency=1, localConfig={"reuse": True})
    more = 'sys.exit(3 if index == 1 and os.environ["NNI_TRIAL_SEQ_ID"] == "0" else 0)'
    trials = run(experiment, more, reuse=True)
    assert [(trial.state.value, trial.exit_code) for trial in trials] == [("FAILED", 3), ("SUCCEEDED", 0)]
    assert {trial.job_id for trial in trials} == {"env-0"}
    assert os.path.exists(
        experiment.folder.workspace.trial(trials[0].trial_id).path / "attempts/0/ps-0/exit.json"
    )
