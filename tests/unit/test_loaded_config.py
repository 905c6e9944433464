"""Configurations of the Python API that are loaded from experiment files, and their canonical form."""

import json
import warnings
from pathlib import Path

import config_corpus
import pytest

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.reader import read_experiment_file
from nni_manager.experiment import AliasHint, ExperimentConfig
from nni_manager.experiment.aliases import NoSuchField

# Comparisons omit these fields, because a configuration in Python lacks them or stores them in another field.
ELSEWHERE = ("author_name", "config_path", "expansions", "warnings", "schema")


ACCEPTED_FILES = [
    pytest.param(file, id=file.stem)
    for file in config_corpus.FILES
    if config_corpus.verdict_path(file).read_text().startswith("accepted\n")
]


def fields_of(checked):
    fields = json.loads(checked.to_json())
    for name in ELSEWHERE:
        del fields[name]
    if fields["tuner"]["own"]:
        # The name of a tuner class that a user wrote is MyTuner in a v1 file, and my_tuner.MyTuner in Python and in a v2 file.
        del fields["tuner"]["name"]
    if fields["pai"] and "://" not in fields["pai"]["host"] and fields["pai"]["host"] != "local":
        fields["pai"]["host"] = f"http://{fields['pai']['host']}"
    return fields


@pytest.mark.parametrize("file", ACCEPTED_FILES)
def test_a_loaded_file_describes_the_same_experiment_in_any_working_folder(file, tmp_path, monkeypatch):
    expected = read_experiment_file(file)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AliasHint)
        config = ExperimentConfig.load(file)
    checked = fields_of(config.checked())
    wanted = fields_of(expected)
    # The default name of an experiment is that of its file, and a configuration in Python has no file.
    if wanted["experiment_name"] == file.stem:
        del wanted["experiment_name"], checked["experiment_name"]
    assert checked == wanted


@pytest.mark.parametrize("file", ACCEPTED_FILES)
def test_the_json_form_of_a_configuration_describes_an_equal_experiment(file, tmp_path, monkeypatch):
    config = ExperimentConfig.load(file)
    monkeypatch.chdir(tmp_path)
    document = json.loads(json.dumps(config.json()))
    assert "searchSpaceFile" not in document
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AliasHint)
        again = ExperimentConfig(**document)
    assert fields_of(again.checked()) == fields_of(config.checked())
    assert again.json() == document


def test_making_a_canonical_copy_does_not_change_the_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
    config = ExperimentConfig("local", trial_command="python3 train.py", search_space_file="space.json")
    config.trial_concurrency, config.tuner.name = 2, "Random"
    before = config.document()
    copied = config.canonical_copy()
    assert config.document() == before
    assert (copied.search_space, copied.search_space_file) == (
        {"x": {"_type": "uniform", "_value": [0, 1]}},
        None,
    )
    assert (copied.trial_code_directory, copied.log_level, copied.debug) == (str(tmp_path), "info", False)
    assert copied.canonical_copy() == copied
    config.trial_concurrency = 0
    with pytest.raises(ConfigInvalid, match="trial_concurrency"):
        config.json()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("trialConcurency: 1\nsearchSpace: {}\n", NoSuchField, "did you mean trial_concurrency"),
        ("[1]\n", ConfigInvalid, "is not a mapping"),
        ("a: [\n", ConfigInvalid, "cannot"),
        ("trainingServicePlatform: local\ntrialConcurrency: x\n", ConfigInvalid, "trialConcurrency"),
    ],
)
def test_the_error_for_an_invalid_file_contains_the_reason(tmp_path, text, error, message):
    (tmp_path / "exp.yml").write_text(text)
    with pytest.raises(error, match=message):
        ExperimentConfig.load(tmp_path / "exp.yml")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigInvalid, match="missing"):
        ExperimentConfig.load(tmp_path / "missing.yml")
