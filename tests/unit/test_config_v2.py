"""Experiment files of NNI's second schema: the same results as for the first schema, and errors with the second schema's keys."""

import json
import re
from pathlib import Path

import pytest

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.model import AssessorConfig, ExperimentSpec, UserClass
from nni_manager.config.reader import read_experiment_file

LOCAL = """\
experimentName: digits
searchSpace:
  lr: {_type: loguniform, _value: [0.001, 1]}
trialCommand: python3 train.py
trialCodeDirectory: .
trialConcurrency: 2
trialGpuNumber: 0
maxExperimentDuration: 2h
maxTrialNumber: 10
tuner:
  name: TPE
  classArgs: {optimize_mode: maximize}
trainingService:
  platform: local
"""
OPENPAI = """\
searchSpaceFile: space.json
trialCommand: python3 train.py
trialConcurrency: 2
trialGpuNumber: 1
tuner: {name: Random}
trainingService:
  platform: openpai
  host: openpai.example.com
  username: ada
  token: a-token
  trialCpuNumber: 4
  trialMemorySize: 8 GB
  dockerImage: registry.example.com/me/train:1
  virtualCluster: default
  localStorageMountPoint: storage
  containerStorageMountPoint: /mnt/confignfs-data
  storageConfigName: confignfs-data
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "storage").mkdir()
    (tmp_path / "space.json").write_text(json.dumps({"x": {"_type": "uniform", "_value": [0, 1]}}))
    return tmp_path


def read(place: Path, text: str) -> ExperimentSpec:
    (place / "exp.yml").write_text(text)
    return read_experiment_file(place / "exp.yml")


def diagnostics(place: Path, text: str) -> list[tuple[int | None, str, str]]:
    with pytest.raises(ConfigInvalid) as caught:
        read(place, text)
    return [(each.line, each.key, each.message) for each in caught.value.diagnostics]


def test_a_local_v2_file_gives_the_same_config_as_the_v1_file(place: Path) -> None:
    config = read(place, LOCAL)
    assert (config.experiment_name, config.training_service) == ("digits", "local")
    assert (config.trial_command, config.code_dir) == ("python3 train.py", place)
    assert (config.max_experiment_duration, config.max_trial_number, config.trial_gpu_number) == (7200, 10, 0)
    assert (config.tuner.name, config.tuner.optimize_mode) == ("TPE", "maximize")
    assert config.search_space_raw == {"lr": {"_type": "loguniform", "_value": [0.001, 1]}}
    assert not config.reuse_mode


def test_an_openpai_v2_file_gives_the_same_config_as_the_v1_file(place: Path) -> None:
    config = read(place, OPENPAI)
    pai = config.cluster
    assert pai is not None
    assert (config.training_service, config.experiment_name) == ("pai", "exp")
    assert (pai.host, pai.user, pai.token) == ("https://openpai.example.com", "ada", "a-token")
    assert (pai.gpu, pai.cpu, pai.memory_mb) == (1, 4, 8192)
    assert (pai.storage, pai.mount, pai.storage_name) == (
        place / "storage",
        "/mnt/confignfs-data",
        "confignfs-data",
    )
    assert (pai.image, pai.virtual_cluster) == ("registry.example.com/me/train:1", "default")
    assert config.reuse_mode, "on by default in v2"
    assert not read(place, OPENPAI + "  reuseMode: false\n").reuse_mode


def test_the_host_local_selects_local_openpai(place: Path) -> None:
    config = read(place, OPENPAI.replace("openpai.example.com", "local"))
    assert not config.cluster.is_this_machine
    assert config.cluster.host == "local"


def test_a_v2_file_sets_the_assessor_and_its_arguments(place: Path) -> None:
    config = read(place, LOCAL + "assessor: {name: Medianstop, classArgs: {start_step: 2}}\n")
    assert config.assessor == AssessorConfig("Medianstop", {"start_step": 2}, optimize_mode="maximize")
    ((_, key, message),) = diagnostics(place, LOCAL + "assessor: {name: Median}\n")
    assert key == "assessor.name"
    assert message.startswith('cannot use assessor.name: "Median" is not a built-in assessor')


@pytest.mark.parametrize(
    ("size", "memory_mb"),
    [("8gb", 8192), ("8 g", 8192), ("1.5GB", 1536), ("512mb", 512), ("1t", 1024 * 1024), ("1048577kb", 1025)],
)
def test_memory_sizes_are_read_with_units(place: Path, size: str, memory_mb: int) -> None:
    config = read(place, OPENPAI.replace("8 GB", f'"{size}"'))
    assert not config.cluster.is_this_machine
    assert config.cluster.memory_mb == memory_mb


def test_keys_in_snake_case_are_accepted(place: Path) -> None:
    text = OPENPAI
    for camel, snake in {
        "trialCommand": "trial_command",
        "searchSpaceFile": "search_space_file",
        "trainingService": "training_service",
        "trialMemorySize": "trial_memory_size",
    }.items():
        text = text.replace(camel, snake)
    assert read(place, text) == read(place, OPENPAI)


@pytest.mark.parametrize(
    ("before", "after", "line", "key", "words"),
    [
        ("trialConcurrency: 2", "trialConcurrency: 0", 3, "trialConcurrency", "cannot use trialConcurrency: 0 is not"),
        ("trialCommand: python3 train.py", "trialCommand: 5", 2, "trialCommand", "without quotes YAML reads 5 as a number"),
        ("  token: a-token", "  token: 5", 10, "trainingService.token", "YAML reads its value as a number"),
        ("8 GB", "much", 12, "trainingService.trialMemorySize", '"much" is not a whole number of MB, at least 100, or'),
        ("8 GB", "1mb", 12, "trainingService.trialMemorySize", 'cannot use trainingService.trialMemorySize: "1mb" is not'),
        ("  storageConfigName", "  storageName", 17, "trainingService.storageName", "did you mean"),
        ("trialGpuNumber: 1\n", "", None, "trialGpuNumber", "cannot do without trialGpuNumber"),
        ("  username: ada\n", "", 6, "trainingService.username", "cannot do without trainingService.username"),
        ("name: Random", "name: Randm", 5, "tuner.name", "Random"),
        ("tuner: ", "maxTrialDuration: soon\ntuner: ", 5, "maxTrialDuration", "is not a number and one of s, m, h, d"),
        ("space.json", "no.json", 1, "searchSpaceFile", "cannot use searchSpaceFile: there is no"),
        ("storage\n", "nowhere\n", 15, "trainingService.localStorageMountPoint", "there is no folder"),
    ],
)  # fmt: skip
def test_an_error_contains_the_line_and_the_v2_key(
    place: Path, before: str, after: str, line: int | None, key: str, words: str
) -> None:
    text = OPENPAI.replace(before, after, 1)
    assert text != OPENPAI
    found = [each for each in diagnostics(place, text) if each[1] == key]
    assert len(found) == 1, diagnostics(place, text)
    assert found[0][0] == line or line is None
    assert words in found[0][2]
    assert re.search(r"\b(paiConfig|trial\.\w+|builtinTunerName)\b", found[0][2]) is None, "a key of v1"


def test_all_errors_of_a_v2_file_are_reported_together(place: Path) -> None:
    text = OPENPAI.replace("8 GB", "much").replace("trialConcurrency: 2", "trialConcurrency: none")
    assert [each[1] for each in diagnostics(place, text + "surprise: 1\n")] == [
        "trialConcurrency",
        "trainingService.trialMemorySize",
        "surprise",
    ]


@pytest.mark.parametrize("section", ["assessor", "advisor"])
def test_an_empty_list_in_place_of_a_section_is_rejected(place: Path, section: str) -> None:
    found = diagnostics(place, LOCAL + f"{section}: []\n")
    assert f"cannot use {section}: [] is not a mapping; write e.g. {section}: {{name: " in found[-1][2]


def test_the_error_message_contains_the_line_of_an_error_in_an_inline_search_space(place: Path) -> None:
    ((line, key, message),) = diagnostics(place, LOCAL.replace("[0.001, 1]", "[0.001]"))
    assert (line, key) == (3, "searchSpace.lr")
    assert message.startswith("cannot use")
    ((line, key, message),) = diagnostics(place, LOCAL + "searchSpaceFile: space.json\n")
    assert (line, key) == (2, "searchSpace")
    assert "keep one of the two" in message


def test_several_training_services_in_a_file_are_an_error(place: Path) -> None:
    text = LOCAL.replace(
        "trainingService:\n  platform: local\n", "trainingService: [{platform: local}, {}]\n"
    )
    assert any("several at once" in message for _, _, message in diagnostics(place, text))
    one = text.replace(", {}]", "]")
    expected = "cannot use trainingService: one platform is no list; write one, such as trainingService: {platform: local, ...}"
    assert expected in [message for _, _, message in diagnostics(place, one)]


def test_keys_in_upper_or_lower_case_are_accepted_as_in_nni(place: Path) -> None:
    text = OPENPAI.replace("trialConcurrency", "TrialConcurrency").replace("trialGpuNumber", "trialGPUNumber")
    assert read(place, text) == read(place, OPENPAI)
    found = diagnostics(place, LOCAL + "trial_command: python3 other.py\n")
    assert [(line, message) for line, _, message in found] == [
        (15, "cannot use trial_command: it is another spelling of trialCommand; keep one of the two")
    ]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        *(("90", 90), ("90s", 90), ("0.5h", 1800), ("1.5M", 90), ("2D", 172800), ('"3 h"', 10800)),
        *(
            ("1e3s", 1000),
            ("1.5E+2m", 9000),
            ("25e-1h", 9000),
            ("1e-9s", 1),
            (".5m", 30),
            ("5.m", 300),
            ("+2m", 120),
        ),
    ],
)
def test_a_duration_has_a_unit_or_is_a_number_of_seconds(place: Path, written: str, seconds: float) -> None:
    assert read(place, LOCAL.replace("2h", written)).max_experiment_duration == seconds


@pytest.mark.parametrize(
    "written", ["0", "-1h", "true", "1w", "[1]", "99999999999d", "1e9s", "0e3s", "e3s", ".s"]
)
def test_an_invalid_duration_is_an_error(place: Path, written: str) -> None:
    ((_, key, message),) = diagnostics(place, LOCAL.replace("2h", written))
    assert key == "maxExperimentDuration"
    assert "is not a number and one of s, m, h, d; write e.g. maxExperimentDuration: 1h" in message


def test_a_key_of_the_training_service_takes_precedence_over_the_top_level_key(place: Path) -> None:
    (place / "code").mkdir()
    config = read(place, LOCAL + "  trialCommand: python3 b.py\n  trialCodeDirectory: code\n")
    assert (config.trial_command, config.code_dir) == ("python3 b.py", place / "code")
    assert config.warnings == (
        "trainingService.trialCommand takes precedence over trialCommand",
        "trainingService.trialCodeDirectory takes precedence over trialCodeDirectory",
    )
    text = LOCAL.replace("trialCommand: python3 train.py\n", "") + "  trialCommand: 5\n"
    ((line, key, _),) = diagnostics(place, text)
    assert (line, key) == (14, "trainingService.trialCommand")


def test_a_missing_image_is_replaced_by_nnis_image_with_a_warning(place: Path) -> None:
    config = read(place, OPENPAI.replace("  dockerImage: registry.example.com/me/train:1\n", ""))
    assert not config.cluster.is_this_machine
    assert config.cluster.image == "msranni/nni:latest"
    assert "which lacks trial-keeper; `nnictl help images` describes how" in config.warnings[0]


def test_a_search_space_file_may_be_yaml(place: Path) -> None:
    (place / "space.yml").write_text("lr: {_type: loguniform, _value: [1e-4, 1]}\n")
    space = "searchSpaceFile: space.yml\n"
    config = read(place, OPENPAI.replace("searchSpaceFile: space.json\n", space))
    assert config.search_space_raw == {"lr": {"_type": "loguniform", "_value": [1e-4, 1]}}
    (place / "space.yml").write_text("lr: {_type: loguniform, _value: [1]}\n")
    ((line, key, _),) = diagnostics(place, OPENPAI.replace("searchSpaceFile: space.json\n", space))
    assert (line, key) == (1, "lr")


def test_a_yaml_search_space_with_values_that_json_lacks_is_rejected(place: Path) -> None:
    text = LOCAL.replace(
        "  lr: {_type: loguniform, _value: [0.001, 1]}", "  lr: {_type: choice, _value: [2024-01-01, .nan]}"
    )
    assert [message for _, _, message in diagnostics(place, text)] == [
        'cannot use searchSpace.lr[0]: "2024-01-01" is not a JSON value; put it in quotes, or write a finite number',
        "cannot use searchSpace.lr[1]: NaN is not a JSON value; put it in quotes, or write a finite number",
    ]


def test_a_v2_file_selects_a_custom_tuner_class(place: Path) -> None:
    (place / "mine.py").write_text("class Mine: ...")
    own = "{codeDirectory: ., className: mine.Mine, classArgs: {depth: 3}, callTimeout: 90}"
    config = read(place, OPENPAI.replace("{name: Random}", own))
    assert config.tuner.own == UserClass("mine.Mine", str(place), None, 90.0)
    assert config.tuner.class_args == {"depth": 3}
    ((line, key, message),) = diagnostics(
        place, OPENPAI.replace("{name: Random}", own.replace("mine.Mine", "mine.Nine"))
    )
    assert (line, key) == (5, "tuner.className")
    assert "cannot use tuner.className: " in message
    assert "does not define Nine; write the name of a class in that file" in message
