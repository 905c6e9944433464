"""The configuration of remote machines: in experiment files of both schemas, and in the Python API."""

import os

import pytest

from nni_manager.config.convert import convert
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.reader import read_experiment_file
from nni_manager.errors import InternalError
from nni_manager.experiment import ExperimentConfig, RemoteConfig, RemoteMachineConfig
from nni_manager.training_services.remote.section import RemoteMachine

FILE = """\
searchSpace: {x: {_type: uniform, _value: [0, 1]}}
trialCommand: python3 train.py
trialConcurrency: 1
maxTrialNumber: 1
tuner: {name: Random}
"""
V1 = """\
authorName: ada
experimentName: x
trialConcurrency: 1
trainingServicePlatform: remote
searchSpacePath: search_space.json
tuner: {builtinTunerName: Random}
trial: {command: python3 train.py, codeDir: .}
"""


@pytest.fixture
def key(tmp_path):
    """A private key that only its owner can read."""
    path = tmp_path / "key"
    path.touch(0o600)
    return path


@pytest.fixture
def read(tmp_path):
    """Reads a file in the second schema with these machines. `above` contains lines with other keys."""

    def read(*machines, above=""):
        listed = "".join(f"  - {{{machine}}}\n" for machine in machines)
        file = tmp_path / "config.yml"
        file.write_text(f"{FILE}{above}trainingService:\n  platform: remote\n  machineList:\n{listed}")
        return read_experiment_file(file)

    return read


def refusal(read, *machines):
    with pytest.raises(ConfigInvalid) as raised:
        read(*machines)
    return str(raised.value)


def test_the_host_is_the_only_required_key_of_a_machine(read):
    config = read("host: gpu1")
    assert config.cluster.machines == (RemoteMachine("gpu1"),)
    assert config.reuse_mode
    assert not config.cluster.is_this_machine


def test_every_key_of_a_machine_is_read_and_survives_a_round_trip_through_json(read, key):
    config = read(
        "host: gpu1, port: 2222, user: ada, sshKeyFile: key, sshPassphrase: secret, gpuIndices: '0,2', "
        "maxTrialNumberPerGpu: 2, useActiveGpu: true, pythonPath: ~/venv/bin",
        "host: '2001:db8::1', password: secret",
        above="trialGpuNumber: 1\n",
    )
    assert config.cluster.machines == (
        RemoteMachine("gpu1", 2222, "ada", None, str(key), "secret", (0, 2), 2, True, "~/venv/bin"),
        RemoteMachine("2001:db8::1", password="secret"),
    )
    assert config.warnings == ()
    assert ExperimentSpec.from_json(config.to_json()) == config


def test_a_v1_file_describes_the_same_machines_as_its_conversion_to_v2(tmp_path, key):
    (tmp_path / "search_space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
    machines = "machineList:\n  - {ip: gpu1, username: ada, sshKeyPath: key, passphrase: secret}\n"
    (tmp_path / "v1.yml").write_text(V1 + machines)
    config = read_experiment_file(tmp_path / "v1.yml")
    assert config.cluster.machines == (RemoteMachine("gpu1", 22, "ada", None, str(key), "secret"),)
    assert not config.reuse_mode, "the default of the first schema"
    (tmp_path / "v1.yml").write_text(f"{V1}{machines}remoteConfig: {{reuse: true}}\n")
    assert read_experiment_file(tmp_path / "v1.yml").reuse_mode
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "v2.yml").write_text(convert(tmp_path / "v1.yml", tmp_path / "sub").text)
    assert read_experiment_file(tmp_path / "sub" / "v2.yml").cluster == config.cluster


def test_a_password_takes_precedence_over_a_key_as_in_nni(read):
    config = read("host: gpu1, password: secret, sshKeyFile: missing, sshPassphrase: secret")
    assert config.cluster.machines == (RemoteMachine("gpu1", password="secret"),)
    assert [warning.partition(";")[0] for warning in config.warnings] == [
        "trainingService.machineList[0].password takes precedence over trainingService.machineList[0].sshKeyFile",
        "trainingService.machineList[0].password takes precedence over trainingService.machineList[0].sshPassphrase",
    ]


def test_a_machine_may_be_listed_again_only_with_a_different_user_or_port(read):
    assert len(read("host: a", "host: a, user: ada", "host: a, port: 2222", "host: b").cluster.machines) == 4
    for again in ("host: a", "host: A", "host: a, port: 22"):
        assert "is listed twice with the same port and user; remove one of the two" in refusal(
            read, "host: a", again
        )


@pytest.mark.parametrize("machine", ["host: []", "host: a, user: []", "host: a, port: {}"])
def test_a_machine_key_of_the_wrong_type_is_refused(read, machine):
    assert "trainingService.machineList[0]." in refusal(read, machine, "host: b")


def test_an_unusable_ssh_key_file_is_refused_with_the_reason(read, key):
    key.chmod(0o640)
    assert f"other users may access {key}, which ssh refuses as well; run `chmod 600 {key}`" in refusal(
        read, "host: a, sshKeyFile: key"
    )
    key.rename(f"{key}.pub")
    assert f"{key}.pub is a public key; name the private key, {key}" in refusal(
        read, "host: a, sshKeyFile: key.pub"
    )
    assert f"there is no file {key}; fix the path" in refusal(read, "host: a, sshKeyFile: key")
    assert 'the user in "~nobody-of-this-name/key" is unknown' in refusal(
        read, "host: a, sshKeyFile: ~nobody-of-this-name/key"
    )


@pytest.mark.skipif(os.getuid() == 0, reason="root can read any file")
def test_an_ssh_key_file_that_the_user_cannot_read_is_refused(read, key):
    key.chmod(0)
    assert f"you cannot read {key}; run nnictl as its owner" in refusal(read, "host: a, sshKeyFile: key")


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ("host: ada@gpu1", '"ada@gpu1" contains a user; write host: gpu1 and user: ada'),
        ("host: 'gpu1:2222'", '"gpu1:2222" contains a port; write host: gpu1 and port: 2222'),
        ("host: 'a b'", '"a b" is not the name or the address of a machine'),
        ("host: -oProxyCommand=x", "is not the name or the address of a machine"),
        ("host: a$(x)", "is not the name or the address of a machine"),
        ("host: 'a:b:c'", "is not the name or the address of a machine"),
        ("host: a, user: -oProxyCommand=x", "is not the name of your account there"),
        ("host: a, password: 12345", "without quotes YAML reads its value as a number; put it in quotes"),
        ("host: a, port: 0", "0 is not a whole number from 1 to 65535"),
        ("host: a, pythonPath: /opt/bin/python3.11", "is a program; write its folder, pythonPath: /opt/bin"),
        ("host: a, pythonPath: venv/bin", "is not an absolute path of a folder on the machine"),
        ("host: a, passwd: x", "it belongs to NNI's first schema; write password here"),
        ("host: a, preCommand: x", "write the commands before the one of the trial, in trialCommand"),
    ],
)
def test_the_error_for_an_invalid_machine_value_contains_a_reason_but_no_secret(read, machine, words):
    message = refusal(read, machine)
    assert words in message
    assert "12345" not in message


def test_a_user_name_of_a_machine_may_contain_a_windows_domain(read):
    assert read(r"host: a, user: CORP\ada").cluster.machines[0].user == r"CORP\ada"


def test_a_limit_of_trials_per_gpu_causes_a_warning_if_trials_request_no_gpus(read):
    assert read("host: a, maxTrialNumberPerGpu: 2", above="trialGpuNumber: 1\n").warnings == ()
    (warning,) = read("host: a, maxTrialNumberPerGpu: 2").warnings
    assert "machineList[0].maxTrialNumberPerGpu has no effect without trialGpuNumber" in warning


def test_private_keys_are_not_copied_with_the_code(read, key):
    config = read("host: a, sshKeyFile: key", "host: b, sshKeyFile: key", "host: c")
    assert config.secret_files == (config.config_path, key)


def test_a_stored_host_that_ssh_would_parse_as_an_option_is_refused(read):
    stored = read("host: gpu1").to_json()
    with pytest.raises(InternalError, match=r"remote\.machines\.0\.host"):
        ExperimentSpec.from_json(stored.replace('"gpu1"', '"-oProxyCommand=x"'))


def test_messages_name_a_machine_by_user_host_and_port(read):
    config = read("host: gpu1, user: ada", "host: '2001:db8::1', port: 2222", "host: gpu2, port: 22")
    assert config.cluster.receiver_of_login == "ada@gpu1, [2001:db8::1]:2222, gpu2"


def test_the_keys_of_a_machine_are_fields_of_the_python_configuration(key):
    config = ExperimentConfig("remote")
    assert isinstance(config.training_service, RemoteConfig)
    config.training_service.machine_list = [
        RemoteMachineConfig(
            host="gpu1", user="ada", ssh_key_file=key, ssh_passphrase="secret", gpu_indices=[0, 1]
        ),
    ]
    config.search_space = {"x": {"_type": "uniform", "_value": [0, 1]}}
    config.trial_command, config.trial_concurrency = "true", 1
    config.validate()
    assert "secret" not in repr(config)
    config.training_service.machine_list[0].port = 0
    with pytest.raises(ConfigInvalid, match=r"config\.training_service\.machine_list\[0\]\.port: 0 is not"):
        config.validate()
