"""Custom algorithms that are registered by name, and the errors for invalid algorithms."""

import pytest

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.registered_algorithms import (
    AlgorithmFileInvalid,
    AlgorithmTaken,
    AlgorithmUnknown,
    RegisteredAlgorithm,
    read_meta,
    register,
    registered,
    registered_algorithms,
    registry_file,
    unregister,
)

DEMO = RegisteredAlgorithm("tuner", "demo", "demo_tuner.DemoTuner")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def test_no_algorithm_is_registered_by_default():
    assert registered_algorithms() == []
    assert registered("tuner", "demo") is None


def test_an_algorithm_is_found_by_kind_and_name_until_it_is_unregistered(home):
    other = RegisteredAlgorithm("assessor", "demo", "a.b.C", "a.b.V", home)
    register(DEMO, set())
    register(other, set())
    assert registered_algorithms() == [DEMO, other]
    assert registered("assessor", "demo") == other
    assert unregister("demo") == [DEMO, other]
    assert registered_algorithms() == []
    with pytest.raises(AlgorithmUnknown, match="cannot unregister 'demo': it is not registered"):
        unregister("demo")


def test_a_registered_or_built_in_name_cannot_be_registered_again():
    register(DEMO, {"TPE"})
    with pytest.raises(
        AlgorithmTaken, match="registered already; choose another name, or `nnictl algo unreg"
    ):
        register(DEMO, set())
    with pytest.raises(AlgorithmTaken, match="a built-in tuner has this name"):
        register(DEMO, {"demo"})


def test_a_meta_file_of_nni_is_read(home):
    meta = home / "meta.yml"
    meta.write_text(
        "algoType: tuner\nbuiltinName: demo\nclassName: demo_tuner.DemoTuner\n"
        "classArgsValidator: demo_tuner.MyClassArgsValidator\n"
    )
    assert read_meta(meta) == RegisteredAlgorithm(
        "tuner", "demo", "demo_tuner.DemoTuner", "demo_tuner.MyClassArgsValidator"
    )
    meta.write_text("{algo_type: assessor, builtin_name: d, class_name: m.C, codeDirectory: .}")
    assert read_meta(meta).code_dir == home


def test_all_errors_of_a_meta_file_are_reported_together(home):
    meta = home / "meta.yml"
    meta.write_text("algoType: advisor\nbuiltinName: a b\nclassname: X\ncodeDirectory: none\n")
    with pytest.raises(ConfigInvalid) as raised:
        read_meta(meta)
    assert [each.key for each in raised.value.diagnostics] == [
        "algoType", "builtinName", "className", "classname",
    ]  # fmt: skip
    meta.write_text("{algoType: tuner, builtinName: d, className: m.C, codeDirectory: none}")
    with pytest.raises(
        ConfigInvalid, match=r"cannot use codeDirectory: there is no folder .*none; create it"
    ):
        read_meta(meta)


def test_a_registry_file_of_nni_is_read_without_the_built_in_algorithms_of_nni():
    registry_file().parent.mkdir(parents=True)
    registry_file().write_text(
        "advisors: []\nassessors: null\ntuners:\n"
        "- {builtinName: TPE, className: nni.hyperopt.T, source: nni, anything: [1]}\n"
        "- {builtinName: demo, className: demo_tuner.DemoTuner, source: user, acceptClassArgs: true}\n"
    )
    assert registered_algorithms() == [DEMO]


@pytest.mark.parametrize("text", ["[]", "tuners: 1", "tuners: [1]", "tuners: [{builtinName: x}]", "{", ""])
def test_an_invalid_registry_file_causes_a_single_error_that_contains_its_path(text):
    registry_file().parent.mkdir(parents=True)
    registry_file().write_text(text)
    with pytest.raises(AlgorithmFileInvalid, match=r"fix or remove .*registered_algorithms\.yml"):
        registered_algorithms()
