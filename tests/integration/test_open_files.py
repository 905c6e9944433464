"""The limit of open files: the manager's own, and that of what it starts."""

import resource

import pytest

USUAL = 1000
SHOWS_LIMIT = """
import resource
import nni_sdk as nni
nni.get_next_parameter()
nni.report_final_result(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.fixture
def a_usual_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= USUAL:
        pytest.skip(f"this user may not have more than {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_manager_takes_as_many_as_it_may_have_and_a_trial_has_the_usual_limit(
    a_usual_limit, a_real_experiment
):
    experiment = a_real_experiment(SHOWS_LIMIT, maxTrialNum=1, trialConcurrency=1)
    experiment.start()
    experiment.wait_for_status("DONE")
    assert resource.prlimit(experiment.manager.pid, resource.RLIMIT_NOFILE)[0] == a_usual_limit
    (trial,) = experiment.get("/trial-jobs")
    assert trial["value"] == USUAL
