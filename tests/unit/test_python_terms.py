"""Messages of the manager in the terms of the Python API."""

import pytest

from nni_manager.domain.metrics import objective_hint
from nni_manager.errors import RetryableError
from nni_manager.experiment.python_terms import in_python, in_python_terms, summary_in_python
from nni_manager.store.folders import ExperimentExists, ExperimentFolder


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("its trials continue; `nnictl resume aB3dE --foreground` finds them", "Experiment.resume('aB3dE') finds them"),
        ("it was stopped; `nnictl resume aB3dE` resumes it", "it was stopped; Experiment.resume('aB3dE') resumes it"),
        ("lower gpuNum, or trialGpuNumber (0 hides", "lower trial_gpu_number (0 hides"),
        ("choose another with --port N or --port auto", 'choose another with port=N or port="auto"'),
        (objective_hint('{"loss": 1}'), 'name the metric, such as objectives=[{"metric": "loss", "mode": "minimize"}] (or'),
    ],
)  # fmt: skip
def test_keys_and_commands_in_messages_are_translated_into_python_fields_and_methods(message, expected):
    assert expected in in_python(message)


def test_the_hint_about_a_result_is_translated_but_not_the_text_from_the_trial():
    message = "KeyError: maxTrialNum" + objective_hint('{"loss": 1}')
    shown = summary_in_python({"latestWithoutResult": {"message": message}})["latestWithoutResult"]["message"]
    assert shown.startswith(
        'KeyError: maxTrialNum, or name the metric, such as objectives=[{"metric": "loss"'
    )
    assert summary_in_python({"latestWithoutResult": None}) == {"latestWithoutResult": None}


def test_a_raised_error_gets_a_translated_message_and_keeps_its_type(tmp_path):
    with pytest.raises(RetryableError) as caught, in_python_terms():
        raise RetryableError("cannot lower gpuNum; try `nnictl resume aB3dE` later")
    assert str(caught.value) == "cannot lower trial_gpu_number; try Experiment.resume('aB3dE') later"
    assert caught.value.__cause__ is caught.value.__context__ is None, "the traceback has one error"
    with pytest.raises(ExperimentExists, match="cannot create experiment aB3dE"), in_python_terms():
        raise ExperimentExists(ExperimentFolder(tmp_path / "aB3dE"))
