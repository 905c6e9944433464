"""Each error in an experiment file causes one message. The message contains the line, and the key names of the schema that the
file uses.
"""

import json

import pytest
from openpai_jobs import JOB

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.reader import read_experiment_file

HEAD = {
    "authorName": "ada",
    "experimentName": "digits",
    "trialConcurrency": 1,
    "searchSpacePath": "space.json",
}
TUNER = {"builtinTunerName": "TPE", "classArgs": {"optimize_mode": "maximize"}}
LOCAL = {
    **HEAD,
    "trainingServicePlatform": "local",
    "tuner": TUNER,
    "trial": {"command": "true", "codeDir": "."},
}
PAI_TRIAL = {
    "command": "true",
    "codeDir": ".",
    "gpuNum": 0,
    "cpuNum": 1,
    "memoryMB": 1000,
    "image": "python:3",
    "nniManagerNFSMountPath": ".",
    "containerNFSMountPath": "/mnt/data",
    "paiStorageConfigName": "data",
}
PAI_CONFIG = {"userName": "ada", "token": "t", "host": "openpai.example.com"}
PAI = {**HEAD, "trainingServicePlatform": "pai", "tuner": TUNER, "trial": PAI_TRIAL, "paiConfig": PAI_CONFIG}


@pytest.fixture
def read(tmp_path):
    """Writes an experiment file with one key per line and a search space file, and reads the experiment file."""

    def read(keys, space=None):
        # Each JSON value is also valid YAML, so these lines are a YAML file.
        lines = [f"{json.dumps(key)}: {json.dumps(value)}\n" for key, value in keys.items()]
        (tmp_path / "experiment.yml").write_text("".join(lines))
        (tmp_path / "job.yml").write_text(json.dumps(JOB))
        space = space or {"lr": {"_type": "uniform", "_value": [0, 1]}}
        (tmp_path / "space.json").write_text(json.dumps(space))
        return read_experiment_file(tmp_path / "experiment.yml")

    return read


@pytest.fixture
def only_message(read):
    """Returns the error of an experiment file, which must have exactly one error."""

    def only(keys, space=None):
        with pytest.raises(ConfigInvalid) as refused:
            read(keys, space)
        (diagnostic,) = refused.value.diagnostics
        return diagnostic

    return only


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (
            {**PAI, "paiConfig": {**PAI_CONFIG, "nfs": {"server": "10.0.0.1", "path": "/nni"}}},
            "paiConfig.nfs",
        ),
        ({**PAI, "paiConfig": {**PAI_CONFIG, "storage": "nfs"}}, "paiConfig.storage"),
        ({**LOCAL, "localConfig": {"pvc": {"path": "/nni"}}}, "localConfig.pvc"),
    ],
)
def test_an_unsupported_storage_section_causes_a_single_error_that_lists_the_valid_keys(
    only_message, keys, what
):
    assert only_message(keys).message.startswith(
        f"cannot use {what}: there is no such key here; remove it or use one of "
    )


@pytest.mark.parametrize("value", ["\n", " ", "a\nb", "a\tb", "a\x1b"])
@pytest.mark.parametrize("key", ["image", "virtualCluster", "paiStorageConfigName", "containerNFSMountPath"])
def test_a_blank_or_multi_line_name_in_the_trial_section_is_an_error(only_message, key, value):
    message = only_message({**PAI, "trial": {**PAI_TRIAL, key: value}}).message
    assert message.startswith(f"cannot use trial.{key}: {json.dumps(value)} is not "), message


@pytest.mark.parametrize("host", ["..", "a..b", ".a", ":80", "http://", "http://[::1", "https://./x"])
def test_an_openpai_url_without_a_host_name_is_refused(only_message, host):
    message = only_message({**PAI, "paiConfig": {**PAI_CONFIG, "host": host}}).message
    assert message.startswith(f'cannot use paiConfig.host: "{host}" is not the host of OpenPAI'), message


@pytest.mark.parametrize(
    "host", ["local", "a_b", "a.b.", "10.0.0.1:80", "http://[::1]:80/pai", "https://a.example.com/x"]
)
def test_an_openpai_url_with_a_host_name_is_accepted_unchanged(read, host):
    assert read({**PAI, "paiConfig": {**PAI_CONFIG, "host": host}}).cluster.host == host


@pytest.mark.parametrize("key", ["localConfig_", "_localConfig", "local__config"])
def test_a_v1_key_with_a_stray_underscore_is_rejected_as_unknown(only_message, key):
    message = only_message({**LOCAL, key: {"reuse": True}}).message
    assert message.startswith(f"cannot use {key}: there is no such key here; did you mean localConfig?"), (
        message
    )


def test_a_v1_key_in_snake_case_is_accepted(read):
    keys = {
        **LOCAL,
        "trial": {"command": "true", "code_dir": "."},
        "local_config": {"max_trial_num_per_gpu": 2},
    }
    assert read(keys).cluster.max_trials_per_gpu == 2


@pytest.mark.parametrize("section", ["tuner", "assessor"])
def test_a_call_timeout_for_a_built_in_algorithm_causes_a_warning(read, section):
    algorithm = TUNER if section == "tuner" else {"builtinAssessorName": "Medianstop"}
    keys = {**LOCAL, section: {**algorithm, "callTimeout": "5m"}}
    assert read(keys).warnings == (
        f"{section}.callTimeout has no effect: only your own class can exceed it; remove it",
    )


def test_a_trial_command_in_addition_to_a_job_file_causes_a_warning(read):
    keys = {**PAI, "trial": {**PAI_TRIAL, "paiConfigPath": "job.yml"}}
    assert read(keys).warnings == (
        "trial.command has no effect: the job file of trial.paiConfigPath has the commands; remove it",
    )


def test_the_error_for_an_unknown_tuner_or_parameter_type_lists_the_valid_names_if_none_is_similar(
    only_message,
):
    message = only_message({**LOCAL, "tuner": {**TUNER, "builtinTunerName": "demotuner"}}).message
    assert '"demotuner" is not a built-in tuner; use one of Auto, ' in message
    message = only_message(LOCAL, {"op": {"_type": "layer_choice", "_value": [1]}}).message
    assert '"layer_choice" is not a type; use one of choice, ' in message


@pytest.mark.parametrize(
    ("library", "theirs", "ours"),
    [
        ("W&B", {"min": 1, "max": 5}, ["randint", [1, 6]]),
        ("W&B", {"min": 0.1, "max": 5}, ["uniform", [0.1, 5]]),
        ("W&B", {"values": ["a", 2]}, ["choice", ["a", 2]]),
        ("W&B", {"value": 3}, ["choice", [3]]),
        ("W&B", {"distribution": "int_uniform", "min": 1, "max": 5}, ["randint", [1, 6]]),
        ("W&B", {"distribution": "log_uniform_values", "min": 1e-5, "max": 0.1}, ["loguniform", [1e-5, 0.1]]),
        ("W&B", {"distribution": "q_uniform", "min": 0, "max": 8, "q": 2}, ["quniform", [0, 8, 2]]),
        ("W&B", {"distribution": "normal", "mu": 0, "sigma": 1}, ["normal", [0, 1]]),
        (
            "Optuna",
            {
                "name": "FloatDistribution",
                "attributes": {"step": None, "low": 1e-5, "high": 0.1, "log": True},
            },
            ["loguniform", [1e-5, 0.1]],
        ),
        (
            "Optuna",
            {"name": "IntDistribution", "attributes": {"step": 1, "low": 1, "high": 9, "log": False}},
            ["randint", [1, 10]],
        ),
        (
            "Optuna",
            {"name": "IntDistribution", "attributes": {"step": 1, "low": 1, "high": 9, "log": True}},
            ["qloguniform", [1, 9, 1]],
        ),
        ("Optuna", {"type": "float", "low": 0.0, "high": 1.0, "step": 0.25}, ["quniform", [0.0, 1.0, 0.25]]),
        (
            "Optuna",
            {"name": "CategoricalDistribution", "attributes": {"choices": ["a", "b"]}},
            ["choice", ["a", "b"]],
        ),
    ],
)
def test_the_error_for_the_search_space_notation_of_another_library_shows_the_nni_notation(
    only_message, read, library, theirs, ours
):
    message = only_message(LOCAL, {"lr": theirs}).message
    what, remedy = message.split("; write ")
    assert what == f"cannot use lr: it has the notation of {library}"
    assert json.loads(remedy) == {"_type": ours[0], "_value": ours[1]}
    read(LOCAL, {"lr": json.loads(remedy)})


def test_the_error_for_search_space_keys_without_an_underscore_shows_the_keys_with_an_underscore(
    only_message, read
):
    message = only_message(LOCAL, {"lr": {"type": "uniform", "value": [0, 1]}}).message
    what, remedy = message.split("; write ")
    assert what == "cannot use lr: type and value start with an underscore"
    read(LOCAL, {"lr": json.loads(remedy)})


@pytest.mark.parametrize(
    "other",
    [
        {"min": 0, "max": "b"},
        {"min": 0, "max": 2**1024},
        {"values": 3},
        {"values": []},
        {"low": 0},
        {"distribution": "beta"},
    ],
    ids=lambda other: str(other)[:40],
)
def test_the_error_for_an_unknown_parameter_notation_contains_an_example(read, other):
    with pytest.raises(ConfigInvalid) as refused:
        read(LOCAL, {"lr": other})
    assert refused.value.diagnostics[-1].message == (
        'cannot use lr: _type and _value missing; write a hyper-parameter as {"_type": "uniform", "_value": [0, 1]}'
    )


@pytest.mark.parametrize("missing", ["trialConcurrency", "trial", "searchSpacePath"])
def test_a_missing_top_level_key_is_reported_at_the_first_line(only_message, missing):
    keys = {key: value for key, value in LOCAL.items() if key != missing}
    diagnostic = only_message(keys)
    assert (diagnostic.line, diagnostic.column) == (1, 1)
    assert diagnostic.message.startswith(f"cannot do without {missing}: ")
