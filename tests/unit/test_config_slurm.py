"""The Slurm keys of an experiment file and of the Python API, and the sbatch options for these keys."""

import pytest

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.reader import read_experiment_file
from nni_manager.errors import InternalError, UserError
from nni_manager.experiment import ExperimentConfig, SlurmConfig
from nni_manager.training_services.platform import platform_of
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


def test_a_job_requests_the_gpus_of_its_trial_unless_the_slurm_section_sets_gpus(tmp_path):
    assert options(tmp_path, above="trialGpuNumber: 2\n") == ["--gpus=2"]
    assert options(tmp_path, "gpus: 4", above="trialGpuNumber: 2\n") == ["--gpus=4"]


def test_slurm_jobs_are_reused_by_default(tmp_path):
    assert read(tmp_path).reuse_mode


@pytest.mark.parametrize("limit", ["90", "4:00:00", "04:00:00", "1-00", "2-12:30:00"])
def test_a_quoted_time_limit_in_any_slurm_notation_is_passed_to_sbatch(tmp_path, limit):
    assert options(tmp_path, f'timeLimit: "{limit}"') == [f"--time={limit}"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("timeLimit: 4h", '"4h" is not a time limit of Slurm'),
        ('timeLimit: "4:99:00"', "is not a time limit of Slurm"),
        ("extraArgs: [exclusive]", '"exclusive" is not a long option; write e.g. --exclusive'),
        ("extraArgs: [--requeue]", "--requeue is set for each job by nnictl; remove it"),
        ("extraArgs: [--output=/tmp/x]", "--output is set for each job by nnictl; remove it"),
        ("login: -oProxyCommand=x", '"-oProxyCommand=x" is not a host for ssh, or user@host:port'),
        ("login: login1:65536", '"login1:65536" is not a host for ssh, or user@host:port'),
        ("login: ada@login1:ssh", '"ada@login1:ssh" is not a host for ssh, or user@host:port'),
        ("time: 60", "the key of a time limit is timeLimit"),
    ],
)
def test_an_invalid_slurm_option_is_refused_with_a_reason(tmp_path, key, words):
    with pytest.raises(ConfigInvalid) as raised:
        read(tmp_path, key)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("login", "command"),
    [
        ("login1", "ssh login1 true"),
        ("ada@login1", "ssh ada@login1 true"),
        ("ada@10.1.1.1:2222", "ssh -p 2222 ada@10.1.1.1 true"),
    ],
)
def test_the_ssh_command_contains_the_user_and_the_port_of_the_login_node_if_they_are_set(
    tmp_path, login, command
):
    section = read(tmp_path, f"login: {login}").cluster
    assert section.ssh_login.command("true") == command
    assert section.ssh_login.address == section.receiver_of_login == login


def test_a_stored_login_node_is_checked_like_a_login_node_in_an_experiment_file(tmp_path):
    stored = read(tmp_path, "login: login1").to_json()
    assert ExperimentSpec.from_json(stored).cluster.login == "login1"
    with pytest.raises(InternalError, match=r"slurm\.login"):
        ExperimentSpec.from_json(stored.replace('"login1"', '"-oProxyCommand=x"'))


def test_the_keys_of_slurm_are_fields_of_the_python_configuration():
    config = ExperimentConfig("slurm")
    assert isinstance(config.training_service, SlurmConfig)
    config.training_service.partition = "gpu"
    config.training_service.time_limit = "4:00:00"
    config.training_service.extra_args = ["--exclusive"]
    config.search_space = {"x": {"_type": "uniform", "_value": [0, 1]}}
    config.trial_command, config.trial_concurrency = "true", 1
    config.validate()


@pytest.mark.parametrize("folder", ["runs,2026", "runs:2026"])
def test_a_folder_that_apptainer_cannot_bind_is_refused_only_for_containers(tmp_path, monkeypatch, folder):
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent))
    (tmp_path / "train.sif").touch()
    where = f'experimentWorkingDirectory: "{tmp_path / folder}"\n'
    platform_of(read(tmp_path, above=where)).check_offline()
    with pytest.raises(UserError, match=rf"cannot show \S*/{folder} to a container.* set experimentWorking"):
        platform_of(read(tmp_path, "containerImage: train.sif", above=where)).check_offline()
