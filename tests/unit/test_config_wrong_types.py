"""Experiment files with values of wrong types at any key: each is read, or refused with diagnostics."""

import contextlib
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.reader import read_experiment_file

CORPUS = Path(__file__).parents[1] / "golden/config/files"
VALUES = ([], {}, [[]], [{}], {"a": []}, 1.5, "", None, True, -1, float("nan"), "xxx", "\x00")


def documents():
    """The mappings of the corpus by file name. Some of its files are no YAML, or no mappings."""
    found = {}
    for path in sorted(CORPUS.glob("*.yml")):
        with contextlib.suppress(yaml.YAMLError):
            document = yaml.load(path.read_text(errors="replace"), yaml.CSafeLoader)
            if isinstance(document, dict) and document:
                found[path.name] = document
    return found


DOCUMENTS = documents()


def replaced(value, data):
    """A copy in which one value, at any depth, is replaced."""
    if not isinstance(value, (dict, list)) or not value or not data.draw(st.integers(0, 4)):
        return data.draw(st.sampled_from(VALUES))
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key, copy = data.draw(st.sampled_from(keys)), value.copy()
    copy[key] = replaced(value[key], data)
    return copy


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Path(shutil.copytree(CORPUS, tmp_path_factory.mktemp("corpus") / "files"))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(DOCUMENTS)), data=st.data())
def test_an_experiment_file_with_a_value_of_a_wrong_type_is_read_or_refused_with_diagnostics(
    corpus, name, data
):
    path = corpus / "damaged.yml"
    path.write_text(yaml.safe_dump(replaced(DOCUMENTS[name], data)))
    with contextlib.suppress(ConfigInvalid):
        read_experiment_file(path)


@pytest.mark.parametrize(
    ("tuner", "wrong"),
    [
        ({"name": "", "classArgs": {}}, "tuner.name"),
        ({"name": [], "className": "a.B", "codeDirectory": "."}, "tuner.name"),
    ],
)
def test_a_tuner_name_of_a_wrong_type_is_refused_and_the_error_names_the_key(corpus, tuner, wrong):
    document = yaml.safe_load((corpus / "v2_local_detailed.yml").read_text())
    path = corpus / "damaged.yml"
    path.write_text(yaml.safe_dump(document | {"tuner": tuner}))
    with pytest.raises(ConfigInvalid, match=wrong):
        read_experiment_file(path)
