"""nnictl config: the check of an experiment file, the JSON schemas, and the conversion to the second schema."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from config_corpus import CORPUS

from nni_manager.config.convert import convert
from nni_manager.config.json_schema import json_schema
from nni_manager.config.reader import read_experiment_file

GOOD = "v1_local_smallest.yml"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Copies the corpus and makes the copy the current directory."""
    shutil.copytree(CORPUS / "files", tmp_path / "files")
    monkeypatch.chdir(tmp_path / "files")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "files"


def test_a_valid_file_is_reported_as_valid_with_a_summary(nnictl):
    assert nnictl("config", "check", GOOD) == (
        0,
        f"INFO: {GOOD} is valid (NNI v1 schema)\n"
        "INFO: experiment example_mnist_pytorch on local, tuner TPE, search space of batch_size, lr, momentum\n",
        "",
    )


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ("gpuNum: 400", "cannot run trials on this machine: trial.gpuNum is 400 and the experiment may use "),
        ("command: python9 mnist.py", "cannot find the command 'python9' of trial.command in lacks.yml: "),
    ],
)
def test_config_check_warns_of_missing_gpus_and_programs_for_local_trials(nnictl, here, change, warning):
    key = change.partition(":")[0]
    lines = (here / GOOD).read_text().splitlines()
    kept = [line for line in lines if not line.strip().startswith(f"{key}:")]
    place = next(number for number, line in enumerate(kept) if line.startswith("trial:"))
    (here / "lacks.yml").write_text("\n".join([*kept[: place + 1], f"  {change}", *kept[place + 1 :]]))
    code, _, err = nnictl("config", "check", "lacks.yml")
    assert (code, err.count("\n")) == (0, 1), err
    assert err.startswith(f"WARNING: {warning}")


@pytest.mark.parametrize(
    ("changes", "expected_code", "error"),
    [
        ({"tuner": {"className": "a.B", "codeDirectory": "~nosuch/x"}}, 1, "~nosuch/x"),
        (
            {"searchSpace": {"x": {"_type": "uniform", "_value": {"2024-01-01": 1}}}},
            1,
            '{"2024-01-01": 1}',
        ),
        (
            {"initialTrials": [{"x": "2024-01-01"}]},
            1,
            'cannot use initialTrials[0].x: "2024-01-01" is not a JSON value; put it in quotes',
        ),
        (
            {"tuner": {"className": "a.B", "classArgs": {"a": {"2024-01-01": ["2024-01-01"]}}}},
            1,
            'cannot use tuner.classArgs.a.2024-01-01[0]: "2024-01-01" is not a JSON value',
        ),
    ],
    ids=["unknown user", "date as key", "date", "date in an argument"],
)
def test_config_check_shows_yaml_dates_and_the_home_folder_of_an_unknown_user(
    nnictl, here, changes, expected_code, error
):
    document = {
        "searchSpace": {"x": {"_type": "choice", "_value": [1, 2]}},
        "trialCommand": "true",
        "trialCodeDirectory": ".",
        "trialConcurrency": 1,
        "maxTrialNumber": 3,
        "tuner": {"name": "Random"},
        "trainingService": {"platform": "local"},
    } | changes
    # Without the quotes, YAML reads this text as a date.
    text = json.dumps(document).replace('"2024-01-01"', "2024-01-01")
    (here / "odd.yml").write_text(text)
    code, out, err = nnictl("config", "check", "odd.yml")
    assert (code, error in out + err) == (expected_code, True)


@pytest.mark.parametrize("command", [("validate",), ("validate", "--json"), ("submit",)])
def test_a_job_file_that_is_not_utf_8_is_refused(nnictl, here, command):
    (here / "job.yml").write_bytes(b"name: \xff")
    code, _, err = nnictl("openpai", command[0], "job.yml", *command[1:])
    assert (code, err) == (1, "ERROR: cannot read job.yml: byte 6 is not UTF-8; save the file as UTF-8\n")


@pytest.mark.parametrize("command", ["validate", "submit"])
def test_a_pipe_in_place_of_a_job_file_is_refused_without_waiting(nnictl, here, command):
    os.mkfifo(here / "pipe.yml")
    code, _, err = nnictl("openpai", command, "pipe.yml")
    assert (code, err) == (
        1,
        "ERROR: cannot use pipe.yml: it is not a regular file; fix that and try again\n",
    )


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_config_check_reads_a_pipe_once(nnictl, here, options):
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "w") as written:
        written.write(
            "searchSpace: {lr: {_type: choice, _value: [1]}}\ntrialCommand: 'true'\nmaxTrialNumber: 1\n"
            f"trialCodeDirectory: {here}\ntrialConcurrency: 1\ntuner: {{name: Random}}\ntrainingService: {{platform: local}}\n"
        )
        written.close()
        code, out, err = nnictl("config", "check", f"/dev/fd/{reader}", *options)
    assert (code, err) == (0, "")
    assert "v2" in out


def test_config_check_prints_the_result_for_a_valid_file_as_json(nnictl, here):
    code, out, _ = nnictl("config", "check", "v2_openpai.yml", "--json")
    found = json.loads(out)
    (warning,) = found.pop("warnings")
    assert code == 0
    assert warning.startswith("trainingService.dockerImage is not set")
    assert found == {
        "file": "v2_openpai.yml",
        "isValid": True,
        "diagnostics": [],
        "isRight": True,
        "mistakes": [],
        "schema": "v2",
        "experimentName": "v2_openpai",
        "platform": "pai",
        "tuner": "TPE",
        "assessor": None,
        "searchSpace": ["batch_size", "lr", "momentum"],
        "codeDir": str(here),
    }


def test_every_error_of_an_invalid_file_is_reported_and_the_exit_code_is_one(nnictl):
    code, out, err = nnictl("config", "check", "v1_local_wrong_space.yml")
    assert (code, out) == (1, "")
    assert [line.split(": cannot")[0] for line in err.splitlines()] == [
        f"ERROR: wrong_space.json:{n}" for n in range(2, 8)
    ]
    code, out, err = nnictl("config", "check", "v1_local_wrong_space.yml", "--json")
    found = json.loads(out)
    assert (code, err, found["isValid"], found["isRight"]) == (1, "", False, False)
    assert found["mistakes"] == found["diagnostics"]
    assert found["diagnostics"][0] == {
        "file": "wrong_space.json",
        "line": 2,
        "column": 33,
        "key": "lr",
        "message": "cannot use lr: low 0 is not above 0; loguniform requires a positive low, such as 0.0001",
    }


@pytest.mark.parametrize(
    ("file", "name", "expected"),
    [
        (
            "v2_kubeflow_job.yml",
            ", claimName: nni",
            "10: cannot do without trainingService.storage.claimName: it must be the name of a claim; write e.g. claimName: nni",
        ),
        (
            "v1_frameworkcontroller_template.yml",
            "    name: nni\n",
            "18: cannot do without frameworkcontrollerConfig.pvc.name: it must be the name of a claim; write e.g. name: nni",
        ),
    ],
)
def test_config_check_and_create_refuse_a_volume_claim_without_a_name(nnictl, here, file, name, expected):
    text = (here / file).read_text()
    assert name in text
    (here / "claim.yml").write_text(text.replace(name, ""))
    for words in (["config", "check", "claim.yml"], ["create", "--config", "claim.yml", "--port", "auto"]):
        assert nnictl(*words) == (1, "", f"ERROR: claim.yml:{expected}\n")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--version", "v1"), ("--version", "v2")])
def test_the_schema_is_printed_as_json(nnictl, arguments):
    code, out, err = nnictl("config", "schema", *arguments)
    assert (code, err) == (0, "")
    assert json.loads(out) == json_schema(*arguments[1:])


@pytest.mark.slow
def test_the_schema_contains_keys_examples_and_algorithm_names():
    first, second = json_schema("v1"), json_schema("v2")
    assert first["properties"]["trialConcurrency"] == {
        "description": "The number of trials that run at a time. Value: a whole number from 1 to 99999",
        "examples": [2],
        "minimum": 1,
        "maximum": 99999,
        "type": "integer",
    }
    assert "TPE" in first["definitions"]["v1.tuner"]["properties"]["builtinTunerName"]["examples"]
    assert second["properties"]["trialConcurrency"] == first["properties"]["trialConcurrency"]


def test_config_convert_prints_the_converted_file_to_stdout_and_lists_the_dropped_keys(nnictl):
    code, out, err = nnictl("config", "convert", "v1_pai_password.yml")
    assert code == 0
    assert "  password: correct horse\n" in out
    assert "  reuseMode: false\n" in out
    assert err.splitlines() == [
        "WARNING: dropped authorName: the second schema has no such key",
        "WARNING: dropped paiConfig.maxTrialNumPerGpu: it has no effect on OpenPAI",
        "WARNING: dropped paiConfig.useActiveGpu: it has no effect on OpenPAI",
    ]


def test_a_converted_file_is_private_and_overwrites_an_existing_file_only_with_the_option_force(nnictl, here):
    code, out, _ = nnictl("config", "convert", GOOD, "--output", "new.yml")
    assert (code, out) == (0, "INFO: Wrote new.yml; `nnictl config check new.yml` checks it\n")
    assert (here / "new.yml").stat().st_mode & 0o777 == 0o600
    (here / "new.yml").write_text("mine")
    code, _, err = nnictl("config", "convert", GOOD, "-o", "new.yml")
    assert (code, (here / "new.yml").read_text()) == (1, "mine")
    assert (
        "cannot write new.yml: the file exists already; name another file, or replace it with --force" in err
    )
    assert nnictl("config", "convert", GOOD, "-o", "new.yml", "--force")[0] == 0
    assert read_experiment_file(here / "new.yml").trial_command == "python3 mnist.py"


def test_a_file_converted_into_another_folder_still_refers_to_the_same_code_folder(nnictl, here):
    (here / "sub").mkdir()
    assert nnictl("config", "convert", GOOD, "-o", "sub/new.yml")[0] == 0
    assert read_experiment_file(here / "sub" / "new.yml").code_dir == here


def test_a_file_can_be_converted_into_another_folder_if_its_volume_claim_has_no_path(here):
    text = (here / "v1_frameworkcontroller_template.yml").read_text()
    (here / "exp.yml").write_text(re.sub(r"\n    path: .*", "", text))
    assert yaml.safe_load(convert(here / "exp.yml", here / "sub").text)["trainingService"]["storage"] == {
        "storageType": "pvc",
        "claimName": "nni",
    }


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "v2_openpai.yml",
            "cannot convert v2_openpai.yml: it already is in NNI's second schema; use it unchanged",
        ),
        ("v1_paiyarn.yml", "OpenPAI on YARN was discontinued"),
        ("v1_local_many_mistakes.yml", "cannot use trialConcurrency: 0 is not a whole number"),
        ("none.yml", "cannot read none.yml: there is no such file"),
    ],
)
def test_a_file_that_cannot_be_converted_is_an_error_with_a_reason(nnictl, file, expected):
    code, out, err = nnictl("config", "convert", file)
    assert (code, out) == (1, "")
    assert expected in err


def test_conversion_reads_neither_the_search_space_nor_the_code(here):
    os.rename("search_space.json", "elsewhere.json")
    assert "searchSpaceFile: search_space.json" in convert(Path(GOOD)).text


def test_conversion_quotes_text_that_looks_like_a_number(here):
    (here / "exp.yml").write_text(Path(GOOD).read_text().replace("example_mnist_pytorch", "'1e-4'"))
    assert "experimentName: '1e-4'" in convert(here / "exp.yml").text


def test_conversion_drops_the_class_file_name_if_the_class_name_is_missing(here):
    (here / "exp.yml").write_text(
        Path(GOOD).read_text().replace("builtinTunerName: TPE", "classFileName: a.py")
    )
    assert "a.py" not in convert(here / "exp.yml").text
