"""The keys of Slurm in an experiment file and in Python, and the options of sbatch that they become."""

import pytest

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.reader import read_experiment_file
from nni_manager.experiment import ExperimentConfig, SlurmConfig
from nni_manager.training_services.slurm.render import sbatch_options

FILE = """\
searchSpace: {x: {_type: uniform, _value: [0, 1]}}
trialCommand: python3 train.py
trialCodeDirectory: .
trialConcurrency: 1
maxTrialNumber: 1
tuner: {name: Random}
"""


def read(tmp_path, *keys, above=""):
    service = "".join(f"  {key}\n" for key in ("platform: slurm", *keys))
    file = tmp_path / "config.yml"
    file.write_text(f"{FILE}{above}trainingService:\n{service}")
    return read_experiment_file(file)


def options(tmp_path, *keys, above=""):
    return sbatch_options(read(tmp_path, *keys, above=above).cluster)


def test_gpus_of_a_trial_are_those_of_its_job_unless_the_job_has_a_number_of_its_own(tmp_path):
    assert options(tmp_path, above="trialGpuNumber: 2\n") == ["--gpus=2"]
    assert options(tmp_path, "gpus: 4", above="trialGpuNumber: 2\n") == ["--gpus=4"]


def test_jobs_are_reused_by_default(tmp_path):
    assert read(tmp_path).reuse_mode


@pytest.mark.parametrize("limit", ["90", "4:00:00", "04:00:00", "1-00", "2-12:30:00"])
def test_every_notation_of_a_time_limit_is_passed_on_in_quotes(tmp_path, limit):
    assert options(tmp_path, f'timeLimit: "{limit}"') == [f"--time={limit}"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("timeLimit: 4h", '"4h" is not a time limit of Slurm'),
        ('timeLimit: "4:99:00"', "is not a time limit of Slurm"),
        ("extraArgs: [exclusive]", '"exclusive" is not a long option; write e.g. --exclusive'),
        ("extraArgs: [--requeue]", "--requeue is set for each job by nnictl; remove it"),
        ("extraArgs: [--output=/tmp/x]", "--output is set for each job by nnictl; remove it"),
        ("time: 60", "the key of a time limit is timeLimit"),
    ],
)
def test_an_invalid_slurm_option_is_refused_with_a_reason(tmp_path, key, words):
    with pytest.raises(ConfigInvalid) as raised:
        read(tmp_path, key)
    assert words in str(raised.value)


def test_the_keys_are_fields_in_python():
    config = ExperimentConfig("slurm")
    assert isinstance(config.training_service, SlurmConfig)
    config.training_service.partition = "gpu"
    config.training_service.time_limit = "4:00:00"
    config.training_service.extra_args = ["--exclusive"]
    config.search_space = {"x": {"_type": "uniform", "_value": [0, 1]}}
    config.trial_command, config.trial_concurrency = "true", 1
    config.validate()
