"""The corpus of experiment files. A golden file records for each of them the experiment that it describes, or all of its
errors.
"""

import contextlib
import json
import shutil
from pathlib import Path

import config_corpus
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.config.convert import convert
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.json_schema import json_schema
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.platforms import BY_V1
from nni_manager.config.reader import read_experiment_file
from nni_manager.config.v2 import is_v2
from nni_manager.startup.schema_validators import Draft7Validator

ACCEPTED = [
    file
    for file in config_corpus.FILES
    if config_corpus.verdict_path(file).read_text().startswith("accepted")
]
REFUSED = [file for file in config_corpus.FILES if file not in ACCEPTED]
WITH_KEYS = [
    file for file in config_corpus.FILES if "no YAML" not in config_corpus.verdict_path(file).read_text()
]
NAMES = {"ids": lambda file: file.stem}


@pytest.mark.slow
@pytest.mark.parametrize("file", config_corpus.FILES, **NAMES)
def test_the_result_or_the_errors_of_each_experiment_file_match_its_golden_text(file):
    """After an intended change: run python tests/fakes/config_corpus.py, and review the difference."""
    assert config_corpus.verdict_of(file) == config_corpus.verdict_path(file).read_text()


def test_the_corpus_has_valid_and_invalid_files_of_all_schemas_and_platforms():
    assert len(config_corpus.FILES) >= 40
    covered = {read_experiment_file(file).training_service for file in ACCEPTED}
    assert covered == set(BY_V1), "add valid files of the new platform to tests/golden/config/files"
    assert min(len(ACCEPTED), len(REFUSED)) >= 20
    assert {file.stem for file in config_corpus.FILES} == {
        path.stem for path in config_corpus.CORPUS.glob("verdicts/*")
    }


@pytest.mark.parametrize("file", ACCEPTED, **NAMES)
def test_an_accepted_file_matches_the_json_schema_and_survives_a_round_trip_through_json(file):
    value = yaml.safe_load(file.read_text())
    assert list(config_corpus.validator("v2" if is_v2(value) else "v1").iter_errors(value)) == []
    config = read_experiment_file(file)
    assert ExperimentSpec.from_json(config.to_json()) == config


@pytest.mark.parametrize("file", REFUSED, **NAMES)
def test_every_error_message_contains_its_file_and_a_remedy(file):
    with pytest.raises(ConfigInvalid) as caught:
        read_experiment_file(file)
    for error in caught.value.diagnostics:
        assert Path(error.file).parent == file.parent
        assert error.message.startswith("cannot ")
        assert "; " in error.message or "did you mean" in error.message, error.message
    keys = [(error.line, error.message) for error in caught.value.diagnostics]
    assert len(set(keys)) == len(keys), "each error is reported once"


def comparable_fields(config):
    """The fields of an experiment that both schemas can express, without the fields that depend on the file itself."""
    fields = json.loads(config.to_json())
    for absent in ("schema", "author_name", "config_path", "expansions", "warnings"):
        del fields[absent]
    if fields["tuner"]["own"]:
        # For a class of the user, only the second schema writes the location of the class into the name of the tuner.
        del fields["tuner"]["name"]
    if fields["pai"] and "://" not in fields["pai"]["host"] and fields["pai"]["host"] != "local":
        # A host without a scheme means http in the first schema. The converted file has the scheme.
        fields["pai"]["host"] = f"http://{fields['pai']['host']}"
    return fields


@pytest.mark.parametrize("file", [file for file in ACCEPTED if file.stem.startswith("v1")], **NAMES)
def test_a_converted_file_describes_the_same_experiment_as_the_original(file, tmp_path):
    target = tmp_path / "converted.yml"
    target.write_text(convert(file, tmp_path).text)
    value = yaml.safe_load(target.read_text())
    assert is_v2(value)
    assert list(config_corpus.validator("v2").iter_errors(value)) == []
    assert comparable_fields(read_experiment_file(target)) == comparable_fields(read_experiment_file(file))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_combined_json_schema_agrees_with_the_schema_of_each_version(version):
    both = Draft7Validator(json_schema())
    for file in config_corpus.FILES:
        value = yaml.safe_load(file.read_text()) if file in WITH_KEYS else {}
        if value and version == ("v2" if is_v2(value) else "v1"):
            assert both.is_valid(value) == config_corpus.validator(version).is_valid(value), file


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | st.floats() | st.text(max_size=3) | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=4,
)


def places_of(value, above=()):
    """The paths of all nested values, without the root."""
    if isinstance(value, dict) and "_type" not in value:
        for key, inner in value.items():
            yield (*above, key)
            yield from places_of(inner, (*above, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places_of(inner, (*above, index))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The corpus in a writable folder."""
    return shutil.copytree(config_corpus.CORPUS / "files", tmp_path_factory.mktemp("corpus") / "files")


@given(st.data())
def test_every_accepted_file_is_convertible_and_valid_by_the_json_schema(copy, data):
    """The test replaces one value of a corpus file by an arbitrary value. The schema may be more lenient than the reader, but
    never stricter.
    """
    file = data.draw(st.sampled_from(WITH_KEYS))
    value = yaml.safe_load(file.read_text())
    path = data.draw(st.sampled_from(sorted(places_of(value), key=str)))
    inside = value
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = data.draw(anything)
    changed = copy / file.name
    changed.write_text(yaml.safe_dump(value))
    schema = "v2" if is_v2(value) else "v1"
    try:
        config = read_experiment_file(changed, reads_code=False)
    except ConfigInvalid:
        with contextlib.suppress(ConfigInvalid):
            convert(changed)
        return
    assert list(config_corpus.validator(schema).iter_errors(value)) == []
    if schema == "v1":
        (copy / "converted.yml").write_text(convert(changed).text)
        converted = read_experiment_file(copy / "converted.yml", reads_code=False)
        assert comparable_fields(converted) == comparable_fields(config)


@pytest.mark.parametrize(
    ("version", "name", "key"),
    [("v1", "v1_local_own_tuner", "searchSpacePath"), ("v2", "v2_local_own_tuner", "searchSpaceFile")],
)
def test_a_tuner_class_of_the_user_needs_no_search_space(copy, version, name, key):
    value = yaml.safe_load((config_corpus.CORPUS / "files" / f"{name}.yml").read_text())
    for absent in (value | {key: None}, {other: value[other] for other in value.keys() - {key}}):
        (copy / "without_space.yml").write_text(yaml.safe_dump(absent))
        assert read_experiment_file(copy / "without_space.yml").search_space.parameters == {}
        assert list(config_corpus.validator(version).iter_errors(absent)) == []


STORED = json.loads((config_corpus.CORPUS / "stored_in_0.7.json").read_text())


@pytest.mark.parametrize("name", STORED)
def test_an_experiment_stored_by_an_older_release_is_read_unchanged(name):
    """Commit d61fb1ba wrote the stored texts. FOLDER and HOME stand for paths of the machine on which it ran."""
    text = json.dumps(STORED[name])
    folder, home = config_corpus.CORPUS / "files", Path.home()
    stored = ExperimentSpec.from_json(text.replace("FOLDER", str(folder)).replace("HOME", str(home)))
    assert stored == read_experiment_file(folder / f"{name}.yml")
