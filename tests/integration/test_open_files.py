"""The limit of open files for the manager and for its trials."""

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
def a_lowered_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= USUAL:
        pytest.skip(f"this user may not have more than {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_manager_raises_its_limit_of_open_files_and_trials_keep_the_original_limit(
    a_lowered_limit, a_real_experiment
):
    experiment = a_real_experiment(SHOWS_LIMIT, maxTrialNum=1, trialConcurrency=1)
    experiment.is_forked = False  # a new process inherits the lowered limit of the test
    experiment.start()
    experiment.wait_for_status("DONE")
    assert resource.prlimit(experiment.manager.pid, resource.RLIMIT_NOFILE)[0] == a_lowered_limit
    (trial,) = experiment.get("/trials")
    assert trial["value"] == USUAL
