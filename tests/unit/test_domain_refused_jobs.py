"""Jobs that the cluster refuses permanently. The tests run complete searches on a simulated cluster."""

import pytest
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.events import (
    AskTuner,
    AttemptDelivered,
    AttemptEnded,
    AttemptStarted,
    DispatchTrial,
    DrainJob,
    Finish,
    JobAccepted,
    JobTerminated,
    KeeperConnected,
    KeeperIdle,
    ManagerReady,
    ParametersSuggested,
    SubmitJob,
)
from nni_manager.domain.experiment import MAX_REFUSALS_IN_A_ROW, ExperimentCore, ExperimentState
from nni_manager.domain.objectives import MAXIMIZE
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import TrialState
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.reasons import ExitReason

REFUSED = "cannot submit the job: the cluster says no"


class SearchWithRefusals:
    """A search with a tuner that answers immediately. The test decides whether the cluster accepts a job. Trials are t0, t1, …"""

    def __init__(self, *, reuse=False, concurrency=1, max_trials=20):
        self.experiment = ExperimentCore(
            "exp", Limits(concurrency, max_trials, None), MAXIMIZE, reuses_jobs=reuse
        )
        self.reuse = reuse
        self.submitted, self.dispatched, self.drained = [], [], []
        self.is_finished = False
        self.handle(ManagerReady())

    def handle(self, event):
        for effect in self.experiment.handle(event, 0.0):
            match effect:
                case AskTuner(number):
                    self.handle(ParametersSuggested(f"t{number}", number, {}, {}, 1.0))
                case SubmitJob(job):
                    self.submitted.append(job.job_id)
                case DispatchTrial(job, trial):
                    self.dispatched.append((job.job_id, trial.trial_id))
                case DrainJob(job):
                    self.drained.append(job.job_id)
                case Finish():
                    self.is_finished = True

    def refuse(self, job_id):
        self.handle(JobTerminated(job_id, ExitReason.COULD_NOT_START, REFUSED, 2.0, is_refused=True))

    def accept(self, job_id):
        self.handle(JobAccepted(job_id))
        if self.reuse:
            self.handle(KeeperConnected(job_id, supports_revoke=True))
            self.handle(KeeperIdle(job_id, "main-0"))

    def succeed(self, trial_id):
        key = AttemptKey(trial_id, attempt_id(0), "main-0")
        self.handle(AttemptStarted(key, 10.0))
        self.handle(AttemptEnded(TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 20.0)))
        self.handle(AttemptDelivered(key))

    def leave(self, job_id, reason=ExitReason.KEEPER_LOST):
        self.handle(JobTerminated(job_id, reason, "it has left", 30.0, is_clean=True))

    def states(self):
        return [trial.state for trial in self.experiment.trials.values()]


@pytest.mark.parametrize("reuse", [False, True])
def test_each_refused_job_fails_one_trial_and_three_refusals_in_a_row_fail_the_experiment(reuse):
    search = SearchWithRefusals(reuse=reuse)
    for number in range(MAX_REFUSALS_IN_A_ROW):
        assert search.experiment.state is ExperimentState.RUNNING
        assert len(search.submitted) == number + 1
        search.refuse(search.submitted[number])
    assert search.states() == [TrialState.FAILED] * MAX_REFUSALS_IN_A_ROW
    assert {trial.run.message for trial in search.experiment.trials.values()} == {REFUSED}
    assert search.experiment.state is ExperimentState.ERROR
    assert search.is_finished
    assert search.experiment.error == (
        f"cannot submit jobs: the cluster refused 3 jobs in a row, the last one with the message: {REFUSED}; fix the cause, then "
        "run `nnictl resume`"
    )


def test_a_job_that_is_lost_or_fails_to_start_does_not_count_as_refused():
    search = SearchWithRefusals()
    for number in range(2 * MAX_REFUSALS_IN_A_ROW):
        search.handle(JobTerminated(search.submitted[number], ExitReason.COULD_NOT_START, "no bash", 2.0))
    assert search.experiment.state is ExperimentState.RUNNING


def test_running_trials_continue_when_refusals_end_the_experiment():
    search = SearchWithRefusals(concurrency=4)
    search.accept(search.submitted[0])
    search.handle(AttemptStarted(AttemptKey("t0", attempt_id(0), "main-0"), 10.0))
    for job_id in search.submitted[1:4]:
        search.refuse(job_id)
    assert search.experiment.state is ExperimentState.ERROR
    for job_id in search.submitted[4:]:
        search.refuse(job_id)
    assert not search.is_finished
    search.succeed("t0")
    assert search.is_finished
    assert search.states() == [TrialState.SUCCEEDED, *[TrialState.FAILED] * (len(search.submitted) - 1)]
    assert len(search.submitted) == 6, "no job is submitted after the third refusal"


def test_a_refused_job_that_no_trial_needs_counts_as_a_refusal_but_fails_no_trial():
    search = SearchWithRefusals(reuse=True, concurrency=2, max_trials=2)
    first, second = search.submitted
    search.accept(first)
    search.succeed("t0")
    search.handle(KeeperIdle(first, "main-0"))
    assert search.dispatched == [(first, "t0"), (first, "t1")]
    search.refuse(second)
    assert search.experiment.refusals == 1
    assert search.states() == [TrialState.SUCCEEDED, TrialState.WAITING]
    search.succeed("t1")
    assert search.is_finished
    assert search.experiment.state is ExperimentState.DONE


def test_a_resume_resets_the_count_of_refusals_in_a_row():
    search = SearchWithRefusals()
    for number in range(MAX_REFUSALS_IN_A_ROW):
        search.refuse(search.submitted[number])
    search.handle(ManagerReady())
    search.refuse(search.submitted[-1])
    assert search.experiment.state is ExperimentState.RUNNING


@given(
    reuse=st.booleans(),
    concurrency=st.integers(1, 4),
    max_trials=st.integers(1, 8),
    data=st.data(),
)
def test_a_search_ends_after_any_order_of_events_and_fails_only_after_too_many_refusals_in_a_row(
    reuse, concurrency, max_trials, data
):
    search = SearchWithRefusals(reuse=reuse, concurrency=concurrency, max_trials=max_trials)
    answered, refused, ran = [], 0, []
    in_a_row, longest = 0, 0
    left = []
    for _ in range(400):
        if search.is_finished:
            break
        open_jobs = [job_id for job_id in search.submitted if job_id not in answered]
        runs = [pair for pair in search.dispatched if pair not in ran] if reuse else []
        idle = [job_id for job_id in search.drained if job_id not in left and job_id in answered]
        if open_jobs and (not runs or data.draw(st.booleans())):
            job_id = data.draw(st.sampled_from(open_jobs))
            answered.append(job_id)
            if data.draw(st.booleans()):
                search.accept(job_id)
                in_a_row = 0
                if not reuse:
                    search.succeed(search.experiment.jobs.live[job_id].trial_id)
                    search.leave(job_id)
            else:
                refused, in_a_row = refused + 1, in_a_row + 1
                longest = max(longest, in_a_row)
                search.refuse(job_id)
        elif runs:
            job_id, trial_id = data.draw(st.sampled_from(runs))
            ran.append((job_id, trial_id))
            search.succeed(trial_id)
            search.handle(KeeperIdle(job_id, "main-0"))
        else:
            assert idle, "some event is possible"
            left.append(idle[0])
            search.leave(idle[0])
    assert search.is_finished
    assert all(state.is_terminal for state in search.states())
    failed = search.states().count(TrialState.FAILED)
    assert failed <= refused
    assert reuse or failed == refused
    is_error = longest >= MAX_REFUSALS_IN_A_ROW
    assert search.experiment.state is (ExperimentState.ERROR if is_error else ExperimentState.DONE)
    assert (REFUSED in search.experiment.error) is is_error
