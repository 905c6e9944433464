"""The experiment file: its values, and one error message for each possible error."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nni_manager.config import algorithms
from nni_manager.config.algorithm import Need
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.model import (
    AssessorConfig,
    Expansion,
    ExperimentSpec,
    TunerConfig,
    UserClass,
)
from nni_manager.config.reader import read_experiment_file
from nni_manager.config.registered_algorithms import RegisteredAlgorithm, register, registry_file
from nni_manager.config.search_space import SearchSpace, Uniform
from nni_manager.errors import InternalError, UserError
from nni_manager.training_services.local.section import LocalSection
from nni_manager.tuner.registry import make_assessment, make_tuner

SPACE = '{"lr": {"_type": "uniform", "_value": [0, 1]}}'
GOOD = """\
authorName: ada
experimentName: digits
trialConcurrency: 2
trainingServicePlatform: local
searchSpacePath: search_space.json
useAnnotation: false
tuner:
  builtinTunerName: TPE
  classArgs:
    optimize_mode: maximize
trial:
  command: python3 train.py
  codeDir: .
"""


@pytest.fixture
def write(tmp_path):
    """Writes the valid experiment file with replacements, and its search space. Returns the path."""

    def write_files(text=GOOD, space=SPACE, **changed):
        for old, new in changed.pop("replace", {}).items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "search_space.json").write_text(space, encoding="utf-8")
        path = tmp_path / "experiment.yml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_files


@pytest.fixture
def diagnostics(write):
    """The errors of an experiment file, one per line, without the folder in the paths."""

    def lines(*args, **kwargs):
        path = write(*args, **kwargs)
        with pytest.raises(ConfigInvalid) as caught:
            read_experiment_file(path)
        assert str(caught.value).splitlines() == [str(error) for error in caught.value.diagnostics]
        return [line.replace(f"{path.parent}/", "") for line in str(caught.value).splitlines()]

    return lines


def test_a_file_with_only_the_required_keys_gets_the_default_values(write, tmp_path):
    config = read_experiment_file(write())
    assert config == ExperimentSpec.model_construct(
        experiment_name="digits",
        author_name="ada",
        description=None,
        trial_concurrency=2,
        max_trial_number=None,
        training_service="local",
        search_space=SearchSpace({"lr": Uniform(0.0, 1.0)}),
        search_space_raw={"lr": {"_type": "uniform", "_value": [0, 1]}},
        tuner=TunerConfig("TPE", "maximize", None, {"optimize_mode": "maximize"}),
        trial_command="python3 train.py",
        trial_gpu_number=None,
        code_dir=tmp_path,
        nni_manager_ip=None,
        log_dir=Path.home() / "nni-experiments",
        log_collection="none",
        log_level="info",
        debug=False,
        version_check=True,
        cluster=LocalSection(),
        config_path=tmp_path / "experiment.yml",
        expansions=(
            Expansion("searchSpacePath", "search_space.json", tmp_path / "search_space.json"),
            Expansion("trial.codeDir", ".", tmp_path),
        ),
    )


def test_every_key_of_a_local_experiment_is_read(write, tmp_path):
    text = GOOD.replace("optimize_mode: maximize", "optimize_mode: minimize\n    seed: 7") + (
        "  gpuNum: 1\ndescription: d\nmaxExecDuration: 2h\nmaxTrialNum: 20\nlogDir: logs\nlogLevel: debug\n"
        "logCollection: http\ndebug: true\nnniManagerIp: 10.0.0.1\nmultiPhase: false\nmultiThread: false\n"
        "localConfig:\n  gpuIndices: 0, 2\n  maxTrialNumPerGpu: 3\n  useActiveGpu: true\n  reuse: true\n"
        "reuseIdleTimeout: 5m\nmaxTrialsPerJob: 100\nwarmImports: [numpy, sklearn.svm]\n"
    )
    config = read_experiment_file(write(text))
    assert (config.trial_gpu_number, config.description, config.max_experiment_duration) == (1, "d", 7200.0)
    assert (config.max_trial_number, config.log_dir, config.log_level) == (20, tmp_path / "logs", "debug")
    assert (config.log_collection, config.debug, config.nni_manager_ip) == ("http", True, "10.0.0.1")
    assert config.cluster == LocalSection((0, 2), 3, True)
    assert (config.tuner.optimize_mode, config.tuner.seed) == ("minimize", 7)


def test_debug_mode_disables_the_version_check_unless_the_file_enables_the_check(write):
    assert not read_experiment_file(write(GOOD + "debug: true\n")).version_check
    assert read_experiment_file(write(GOOD + "debug: true\nversionCheck: true\n")).version_check


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5.0), ("3m", 180.0), ("2h", 7200.0), ("999d", 86313600.0)]
)
def test_a_duration_is_a_number_and_a_unit(write, text, seconds):
    assert read_experiment_file(write(GOOD + f"maxExecDuration: {text}\n")).max_experiment_duration == seconds


def test_snake_case_keys_are_accepted(write):
    config = read_experiment_file(
        write(replace={"trialConcurrency": "trial_concurrency", "codeDir": "code_dir"})
    )
    assert config.trial_concurrency == 2


def test_a_tilde_at_the_start_of_a_path_is_expanded_to_the_home_folder(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = read_experiment_file(write(GOOD + "logDir: ~/logs\n"))
    assert config.log_dir == tmp_path / "logs"
    assert Expansion("logDir", "~/logs", tmp_path / "logs") in config.expansions


def test_the_list_of_path_expansions_contains_relative_paths_but_no_absolute_path(write, tmp_path):
    config = read_experiment_file(write(replace={"codeDir: .": f"codeDir: {tmp_path}"}))
    assert [each.key for each in config.expansions] == ["searchSpacePath"]


def test_an_assessor_with_arguments_survives_a_round_trip_through_json(write):
    text = GOOD.replace("builtinTunerName: TPE", "builtinTunerName: TPE\n  includeIntermediateResults: true")
    text += "assessor: {builtinAssessorName: Medianstop, classArgs: {start_step: 3}}\n"
    config = read_experiment_file(write(text))
    assert config.assessor == AssessorConfig("Medianstop", {"start_step": 3}, optimize_mode="maximize")
    assert config.tuner.include_intermediate_results
    assert ExperimentSpec.from_json(config.to_json()) == config
    assert make_assessment(config) is not None
    assert make_assessment(read_experiment_file(write())) is None


def test_an_experiment_survives_a_round_trip_through_json(write):
    space = (
        '{"layer": {"_type": "choice", "_value": [1, "a", {"_name": "conv",'
        ' "k": {"_type": "randint", "_value": [1, 3]}}]}}'
    )
    config = read_experiment_file(write(GOOD + "localConfig: {gpuIndices: 1}\n", space))
    assert ExperimentSpec.from_json(config.to_json()) == config


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"local": 1}'])
def test_an_invalid_stored_experiment_raises_an_internal_error(text):
    with pytest.raises(InternalError, match="cannot read the stored experiment"):
        ExperimentSpec.from_json(text)


def test_all_errors_of_experiment_file_and_search_space_are_reported_in_line_order(diagnostics):
    changed = {
        "trialConcurrency: 2": 'trialConcurrency: "two"',
        "authorName: ada\n": "",
        "builtinTunerName: TPE": "builtinTunerName: TPF",
        "codeDir: .": "codeDir: nowhere",
    }
    space = '{"lr": {"_type": "uniform", "_value": [1, 0]},\n "bs": [16, 32]}'
    found = diagnostics(GOOD + "maxTrialNumbr: 3\n", space, replace=changed)
    assert [re.sub(r"known: authorName, .*, localConfig", "known: …", each) for each in found] == [
        "experiment.yml:1: cannot do without authorName: it must be a name; write e.g. authorName: your name",
        'experiment.yml:2: cannot use trialConcurrency: "two" is not a whole number from 1 to 99999; '
        "write e.g. trialConcurrency: 2",
        'experiment.yml:7: cannot use tuner.builtinTunerName: "TPF" is not a built-in tuner; '
        f"did you mean TPE? (known: {', '.join(algorithms.TUNERS)})",
        "experiment.yml:12: cannot use trial.codeDir: there is no folder nowhere; create it or fix the path",
        "experiment.yml:13: cannot use maxTrialNumbr: there is no such key here; did you mean maxTrialNum? (known: …)",
        "search_space.json:1: cannot use lr: low 1 is not below high 0; swap them or use choice",
        "search_space.json:2: cannot use bs: [16, 32] is not a mapping; "
        'write a hyper-parameter as {"_type": "uniform", "_value": [0, 1]}',
    ]


def test_an_error_contains_the_file_the_position_and_the_key(write):
    path = write(replace={"  codeDir: .": "  codeDir: 3"})
    with pytest.raises(UserError) as caught:
        read_experiment_file(path)
    (error,) = caught.value.diagnostics
    assert (error.file, error.line, error.column) == (str(path), 13, 3)
    assert error.key == "trial.codeDir"


WRONG_VALUES = {
    "trialConcurrency: 2": {
        "trialConcurrency: 0": "cannot use trialConcurrency: 0 is not a whole number from 1 to 99999",
        "trialConcurrency: 100000": "cannot use trialConcurrency: 100000 is not a whole number",
        "trialConcurrency: 2.5": "cannot use trialConcurrency: 2.5 is not a whole number",
        "trialConcurrency: true": "cannot use trialConcurrency: true is not a whole number",
        "trialConcurrency:": "cannot use trialConcurrency: null is not a whole number",
        "trialConcurrency: [1]": "cannot use trialConcurrency: [1] is not a whole number",
        "trialConcurrency: {your_number}": "cannot use trialConcurrency: it is a placeholder of an",
    },
    "experimentName: digits": {
        "experimentName: 007": "cannot use experimentName: without quotes YAML reads 7 as a number; put it in quotes",
        "experimentName: 2024-01-01": 'cannot use experimentName: without quotes YAML reads "2024-01-01" as a date',
        'experimentName: ""': 'cannot use experimentName: "" is not a name',
    },
    "useAnnotation: false": {
        "useAnnotation: 1": "cannot use useAnnotation: 1 is not true or false; write e.g. useAnnotation: false",
        "maxExecDuration: 5|": 'cannot use maxExecDuration: "5|" is not a whole number and one of s, m, h, d',
        "maxExecDuration: 0h": "cannot use maxExecDuration",
        "maxExecDuration: 5": "cannot use maxExecDuration: 5 is not a whole number and one of s, m, h, d",
        "maxTrialNumber: 3": "cannot use maxTrialNumber: it belongs to NNI's second schema; write maxTrialNum here",
        "trainingService: {platform: local}": "it belongs to NNI's second schema, but trainingServicePlatform to the first",
        "sharedStorage: {storageType: NFS}": "cannot use sharedStorage: storage is set per platform",
        "machineList: []": "cannot use machineList: it applies to another platform; write trainingServicePlatform: remote, or",
        "maxTrialNum: many": 'cannot use maxTrialNum: "many" is not a whole number from 1 to 99999',
        "multiPhase: true": "cannot use multiPhase: true: NNI deprecated it, and it is not supported",
        "multiThread: true": "cannot use multiThread: true: NNI deprecated it, and it",
        "nniManagerIp: 1.2.3": 'cannot use nniManagerIp: "1.2.3" is not an IPv4 address or a host name',
        "logLevel: verbose": 'cannot use logLevel: "verbose" is not one of trace, debug, info',
        "logCollection: some": 'cannot use logCollection: "some" is not none or http; write e.g. logCollection: none',
        "logDir: {your_dir}": "cannot use logDir: it is a placeholder of an example",
        'logDir: "{your_dir}"': "cannot use logDir: {your_dir} is a placeholder of an example",
        'logDir: "a\\0b"': "contains a NUL character; fix the path",
        "logDir: ~nobody-of-this-name/x": "is unknown; fix the path",
        "logDir: experiment.yml": "cannot use logDir: experiment.yml is not a folder; name a folder",
        "advisor: {builtinAdvisorName: Hyperband}": "cannot use tuner together with advisor: an advisor replaces both",
        "assessor: {builtinAssessorName: Medianstp}": 'cannot use assessor.builtinAssessorName: "Medianstp" is not a '
        "built-in assessor; did you mean Medianstop?",
        "assessor: {builtinAssessorName: Curvefitting}": "cannot do without assessor.classArgs.epoch_num: it must be",
        "assessor: {builtinAssessorName: Medianstop, classArgs: {start_step: -1}}": "cannot use "
        "assessor.classArgs.start_step: -1 is not a whole number of at least 0",
        "assessor: {className: Mine, builtinAssessorName: Medianstop}": "cannot use assessor.className "
        "together with assessor.builtinAssessorName",
        "assessor: 3": "cannot use assessor: 3 is not a mapping; write e.g. assessor: {builtinAssessorName: Medianstop}",
        "localConfig: {gpuIndices: a}": 'cannot use localConfig.gpuIndices: "a" is not GPU numbers separated by',
        "localConfig: {gpuIndices: '0,0'}": 'cannot use localConfig.gpuIndices: "0,0" is not GPU numbers',
        "localConfig: {maxTrialNumPerGpu: 0}": "cannot use localConfig.maxTrialNumPerGpu: 0 is not a whole number",
        "localConfig: {useGpu: true}": "cannot use localConfig.useGpu: there is no such key here; "
        "did you mean useActiveGpu?",
        "paiConfig: {host: h}": "cannot use paiConfig: it applies to another platform; write "
        "trainingServicePlatform: pai, or remove it",
        "1: x": "cannot use 1: there is no such key here",
    },
    "trainingServicePlatform: local": {
        "trainingServicePlatform: aml": 'cannot use trainingServicePlatform: "aml": Azure Machine Learning is not supported; '
        "use a cluster (pai, frameworkcontroller,",
        "trainingServicePlatform: locl": 'cannot use trainingServicePlatform: "locl" is not a platform; '
        "did you mean local?",
        "trainingServicePlatform: [local]": 'cannot use trainingServicePlatform: ["local"] is not a platform',
    },
    "builtinTunerName: TPE": {
        "builtinTunerName: BOHBB": 'cannot use tuner.builtinTunerName: "BOHBB" is not a built-in tuner; did you mean BOHB?',
        "builtinTunerName: '{your_tuner}'": "cannot use tuner.builtinTunerName: it is a placeholder of an example; write e.g. b",
        "builtinTunerName: PPOTuner": "cannot use tuner.builtinTunerName: PPOTuner is not supported; use Auto",
        "builtinTunerName: BatchTuner": "BatchTuner requires one choice of mappings as the search space; write the search",
        "builtinTunerName: tep": 'cannot use tuner.builtinTunerName: "tep" is not a built-in tuner; '
        "did you mean TPE?",
        "builtinTunerName: 1": "cannot use tuner.builtinTunerName: 1 is not a built-in tuner; use one of Auto, TPE",
        "builtinTunerName: TPE\n  className: Mine": "cannot use tuner.className together with tuner.builtinTunerName: "
        "they exclude each other; remove tuner.builtinTunerName, or the keys of your own class",
        "className: Mine": "cannot use tuner.className: it has no module; write module and class as one name, such as "
        "className: my_tuner.Mine",
        "codeDir: .": "cannot do without tuner.className next to tuner.codeDir: it must be the name of a class; write",
        "className: Mine\n  codeDir: .\n  classFileName: no.py": "no.py; create it, or fix the folder and the names",
        "className: Mine\n  codeDir: none\n  classFileName: mine.py": "cannot use tuner.codeDir: there is no folder",
        "className: Mine\n  codeDir: .\n  classFileName: mine": 'cannot use tuner.classFileName: "mine" is not the name of a Py',
        "className: a.B\n  callTimeout: soon": 'cannot use tuner.callTimeout: "soon" is not a whole number and one of s,',
    },
    "optimize_mode: maximize": {
        "optimize_mode: maximise": 'cannot use tuner.classArgs.optimize_mode: "maximise" is not maximize or minimize',
        "seed: -1": "cannot use tuner.classArgs.seed: -1 is not a whole number from 0 to 4294967295",
        "optimise_mode: maximize": "cannot use tuner.classArgs.optimise_mode: there is no such key here; "
        "did you mean optimize_mode?",
        "constant_liar_type: median": 'cannot use tuner.classArgs.constant_liar_type: "median" is not min, max or',
    },
    "searchSpacePath: search_space.json\n": {
        "searchSpacePath: none.json\n": "cannot use searchSpacePath: there is no file none.json; create it or fix the",
        "": "cannot do without searchSpacePath: it must be the path of a JSON file",
        "searchSpacePath: [a]\n": 'cannot use searchSpacePath: ["a"] is not the path of a JSON file',
    },
    "codeDir: .": {
        "codeDir: experiment.yml": "cannot use trial.codeDir: experiment.yml is not a folder; create it or fix the",
        "codeDir: ''": 'cannot use trial.codeDir: "" is not a folder; write e.g. codeDir: .',
        "gpuNum: 1": "cannot do without trial.codeDir: it must be a folder; write e.g. codeDir: .",
        "codeDir: .\n  gpuNum: -1": "cannot use trial.gpuNum: -1 is not a whole number from 0 to 99999",
    },
    "  command: python3 train.py\n  codeDir: .": {
        "  3": "cannot use trial: 3 is not a mapping; write e.g. trial: {command:",
    },
}


def test_the_tuner_checks_its_class_args(diagnostics):
    text = GOOD.replace("builtinTunerName: TPE", "builtinTunerName: GPTuner")
    (line,) = diagnostics(text.replace("optimize_mode: maximize", "nu: 2.0"))
    assert "cannot use tuner.classArgs.nu: 2.0 is not 0.5, 1.5 or 2.5; write e.g. nu: 2.5" in line
    (line,) = diagnostics(text.replace("optimize_mode: maximize", "population_size: 4"))
    assert "cannot use tuner.classArgs.population_size: there is no such key here" in line


def test_contradictory_class_args_are_reported_in_one_error(diagnostics):
    text = GOOD.replace("builtinTunerName: TPE", "builtinTunerName: BOHB")
    (line,) = diagnostics(text.replace("optimize_mode: maximize", "min_budget: 9"))
    assert "cannot use BOHB: min_budget 9 is above max_budget 3; swap them" in line
    (line,) = diagnostics(GOOD + "assessor: {builtinAssessorName: ThresholdPruner}\n")
    assert "cannot use ThresholdPruner without a threshold; write lower, upper or both into" in line


def test_the_error_for_a_tuner_without_its_library_contains_the_install_command(monkeypatch):
    need = Need("no_such_module_here", "cmaes", "tuners", "TPE")
    monkeypatch.setitem(algorithms.TUNERS, "CmaEs", replace(algorithms.TUNERS["CmaEs"], need=need))
    reason = algorithms.reason_against("tuner", "CmaEs")
    assert reason is not None
    assert "CmaEs requires cmaes, which is not installed; run `pip install 'trial-keeper[tuners]'`" in reason
    assert algorithms.reason_against("tuner", "TPE") is None


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (old, new, sentence)
        for old, replacements in WRONG_VALUES.items()
        for new, sentence in replacements.items()
    ],
)
def test_an_invalid_value_is_reported_in_one_sentence(diagnostics, old, new, sentence):
    (line,) = diagnostics(replace={old: new})
    assert sentence in line


def test_an_unsupported_platform_is_reported_as_one_error(diagnostics):
    text = GOOD.replace("Platform: local", "Platform: aml").replace(
        "codeDir: .", "codeDir: .\n  image: i\n  cpuNum: 1"
    )
    (line,) = diagnostics(text + "amlConfig:\n  subscriptionId: s\n")
    assert 'trainingServicePlatform: "aml": Azure Machine Learning is not supported; use a cluster' in line


@pytest.mark.parametrize(
    "section", ["", "tuner:\n", "tuner: {classArgs: {seed: 5}}\n", "tuner: {gpuIndices: '0'}\n"]
)
def test_the_tuner_is_auto_if_the_file_names_no_tuner(write, section):
    tuner = GOOD[GOOD.index("tuner:") : GOOD.index("trial:")]
    config = read_experiment_file(write(replace={tuner: section}))
    assert config.tuner.name == "Auto"
    assert config.tuner.optimize_mode == "maximize"
    assert config.tuner.seed == (5 if "seed" in section else None)
    assert any(each.startswith("Auto will maximize the results") for each in config.warnings)


def test_an_unknown_advisor_causes_one_error_and_no_error_about_the_tuner(diagnostics):
    tuner = GOOD[GOOD.index("tuner:") : GOOD.index("trial:")]
    (line,) = diagnostics(replace={tuner: "advisor: {builtinAdvisorName: bohbb}\n"})
    assert (
        'cannot use advisor.builtinAdvisorName: "bohbb" is not a built-in advisor; did you mean BOHB?' in line
    )


def test_an_advisor_becomes_the_tuner_of_the_experiment(write, diagnostics):
    tuner = GOOD[GOOD.index("tuner:") : GOOD.index("trial:")]
    advisor = (
        "advisor: {builtinAdvisorName: Hyperband, classArgs: {R: 9, optimize_mode: minimize, seed: 4}}\n"
    )
    config = read_experiment_file(write(replace={tuner: advisor}))
    args = {"R": 9, "optimize_mode": "minimize", "seed": 4}
    assert config.tuner == TunerConfig("Hyperband", "minimize", 4, args)
    assert make_tuner(config).ask(0).parameters["TRIAL_BUDGET"] == 1
    (line,) = diagnostics(replace={tuner: advisor.replace("R: 9", "exec_mode: serial")})
    assert 'cannot use advisor.classArgs.exec_mode: "serial" is not parallelism' in line
    (line,) = diagnostics(GOOD + "assessor: {builtinAssessorName: Medianstop}\n", replace={tuner: advisor})
    assert "cannot use assessor together with advisor" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "",
            "experiment.yml: cannot read experiment.yml: the file is empty; write the keys of the experiment",
        ),
        ("# nothing\n", "experiment.yml: cannot read experiment.yml: the file is empty"),
        ("- a\n- b\n", 'experiment.yml:1: cannot use experiment.yml: ["a", "b"] is not a mapping'),
        ("a: 1\n\tb: 2\n", "experiment.yml:2: cannot read experiment.yml: "),
        ("a: [1\nb: 2\n", "experiment.yml:2: cannot read experiment.yml: "),
        ("a: 1\n---\nb: 2\n", "experiment.yml:2: cannot read experiment.yml: "),
        (
            "a: !!python/object:os.system x\n",
            "experiment.yml:1: cannot read experiment.yml: could not determine",
        ),
        ("a: &a [*a]\n", "experiment.yml:1: cannot read experiment.yml: an anchor contains itself"),
        (
            "a: 1\nb: 2024-99-99\n",
            'experiment.yml:2: cannot read experiment.yml: "2024-99-99" is not a valid timestamp; correct it, or put',
        ),
        ("a: !!int\n", 'experiment.yml:1: cannot read experiment.yml: "" is not a valid int; correct it'),
        ("a: !!int x\n", 'experiment.yml:1: cannot read experiment.yml: "x" is not a valid int'),
        ("a: 0x_\n", 'experiment.yml:1: cannot read experiment.yml: "0x_" is not a valid int'),
        ("a: !!float\n", 'experiment.yml:1: cannot read experiment.yml: "" is not a valid float'),
        ("a: !!bool maybe\n", 'experiment.yml:1: cannot read experiment.yml: "maybe" is not a valid bool'),
        ("a: !!timestamp x\n", 'experiment.yml:1: cannot read experiment.yml: "x" is not a valid timestamp'),
        ('a: "\\ud800"\n', "experiment.yml:1: cannot read experiment.yml: half of a surrogate pair is not a"),
        ('? "\\ud800"\n: a\n', "experiment.yml:1: cannot read experiment.yml: half of a surrogate pair is"),
        ("a: \x07\n", "experiment.yml: cannot read experiment.yml: unacceptable character"),
        ("a: " + "[" * 5000, "experiment.yml:1: cannot read experiment.yml: it has more than 100 levels"),
        (b"a: 1\nb: \xff\n", "experiment.yml:2: cannot read experiment.yml: byte 8 is not UTF-8"),
    ],
)
def test_an_unreadable_experiment_file_is_reported_as_one_error(diagnostics, text, sentence):
    (line,) = diagnostics(text)
    assert line.startswith(sentence)


def test_a_duplicate_key_is_an_error(diagnostics):
    assert diagnostics(GOOD + "  gpuNum: 1\n  gpuNum: 2\n") == [
        "experiment.yml:15: cannot use trial.gpuNum: line 14 has the same key; keep one of the two"
    ]


def test_an_error_is_reported_if_the_experiment_file_is_missing_or_is_a_folder(tmp_path):
    with pytest.raises(
        ConfigInvalid, match=r"^cannot read .*/none\.yml: there is no such file; check the path"
    ):
        read_experiment_file(tmp_path / "none.yml")
    with pytest.raises(ConfigInvalid, match="it is a folder; name a file in the folder"):
        read_experiment_file(tmp_path)


@pytest.mark.parametrize("name", ["experiment.yml", "search_space.json"])
def test_a_pipe_in_place_of_the_experiment_or_search_space_file_is_refused_without_waiting(
    write, tmp_path, name
):
    file = write()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(
        ConfigInvalid, match=f"cannot read .*{name}: it is not a regular file; check the file"
    ):
        read_experiment_file(file)


def test_a_code_folder_whose_path_is_not_utf8_is_refused(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xe9p"))
    folder.mkdir()
    (folder / "experiment.yml").write_text(GOOD)
    with pytest.raises(ConfigInvalid) as refused:
        read_experiment_file(folder / "experiment.yml")
    assert any(
        "is not UTF-8, as keepers need it; rename the folder" in each.message
        for each in refused.value.diagnostics
    )


def test_numbers_with_an_exponent_are_parsed_as_numbers(diagnostics):
    (line,) = diagnostics(replace={"trialConcurrency: 2": "trialConcurrency: 1e-4"})
    assert "trialConcurrency: 0.0001 is not" in line


def test_json_with_comments_or_a_last_comma_is_read_as_yaml_with_a_warning(write, tmp_path):
    config = read_experiment_file(write())
    (tmp_path / "search_space.json").write_text(SPACE[:-1] + ", # the rate\n}")
    lenient = read_experiment_file(tmp_path / "experiment.yml")
    assert lenient.search_space == config.search_space
    (warning,) = set(lenient.warnings) - set(config.warnings)
    assert warning.startswith(
        "search_space.json is read as YAML, as in NNI, because it is not JSON at column "
    )


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        (
            "{",
            "search_space.json:1: cannot read search_space.json: not JSON at column 2, Expecting property name",
        ),
        ("", "search_space.json:1: cannot read search_space.json: the file is empty; write a JSON document"),
        ('{"lr":\n nope, [}', "search_space.json:2: cannot read search_space.json: not JSON at column 2"),
        (
            SPACE + " // the rate",
            f"search_space.json:1: cannot read search_space.json: JSON has no comments, as at column {len(SPACE) + 2}; "
            "remove the comment",
        ),
        # This file must not be read as YAML: the comment would become a hyper-parameter.
        (
            SPACE[:-1] + ", // the rate }",
            "search_space.json:1: cannot read search_space.json: JSON has no comments",
        ),
        (
            "/* rates */" + SPACE,
            "search_space.json:1: cannot read search_space.json: JSON has no comments, as at column 1;",
        ),
        ("[]", "search_space.json:1: cannot use the search space: [] is not a mapping"),
        ("{}", "search_space.json:1: cannot use the search space: it names no hyper-parameter"),
        (
            SPACE.replace("1]", "NaN]"),
            "search_space.json: cannot read search_space.json: NaN is not a JSON number",
        ),
        (
            SPACE[:-1] + ",\n\t" + SPACE[1:],
            "search_space.json:2: cannot use lr: line 1 has the same key; keep one of the two",
        ),
    ],
)
def test_an_invalid_search_space_is_one_error_that_names_its_file(diagnostics, space, sentence):
    (line,) = diagnostics(space=space)
    assert line.startswith(sentence)


def test_the_error_message_contains_the_line_of_an_error_in_a_nested_search_space(diagnostics):
    space = (
        '{\n\t"net": {\n\t\t"_type": "choice",\n\t\t"_value": [\n\t\t\t"none",\n\t\t\t{"_name": "conv",\n'
        '\t\t\t "size": {"_type": "randint", "_value": [5, 5]}}\n]}}'
    )
    (line,) = diagnostics(space=space)
    assert line == (
        "search_space.json:7: cannot use net[1].size: low 5 is not below high 5; widen the range or use choice"
    )


def test_an_error_message_shortens_a_long_value(diagnostics):
    (line,) = diagnostics(replace={"trialConcurrency: 2": "trialConcurrency: " + "x" * 500})
    assert len(line) < 220


# ---- custom tuners and assessors


CUSTOM_CLASSES = """tuner:
  codeDir: .
  classFileName: mine.py
  className: Mine
  callTimeout: 2m
  classArgs: {optimize_mode: minimize, anything: [1]}
assessor:
  className: mine.Judge
"""


def test_a_custom_class_is_selected_by_folder_file_and_class_name(write, tmp_path):
    path = write(replace={GOOD[GOOD.index("tuner:") : GOOD.index("trial:")]: CUSTOM_CLASSES})
    (path.parent / "mine.py").write_text("class Mine: ...\nJudge = Mine\n")
    config = read_experiment_file(path)
    here = str(path.parent)
    args = {"optimize_mode": "minimize", "anything": [1]}
    own = UserClass("mine.Mine", here, None, 120.0)
    assert config.tuner == TunerConfig("Mine", "minimize", None, args, own=own)
    assert config.assessor == AssessorConfig("mine.Judge", {}, UserClass("mine.Judge", here))
    assert ExperimentSpec.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("class Mine(:", "mine.py cannot be read as Python: invalid syntax"),
        ("class Other: ...", "mine.py does not define Mine; write the name of a class in that file"),
        ("import Mine", ""),
        ("from x import *", ""),
        ("if True:\n    Mine = 1", ""),
    ],
)
def test_a_code_file_without_the_named_class_is_rejected_before_the_experiment_starts(write, code, sentence):
    tuner = GOOD[GOOD.index("tuner:") : GOOD.index("trial:")]
    path = write(replace={tuner: "tuner: {codeDir: ., classFileName: mine.py, className: Mine}\n"})
    (path.parent / "mine.py").write_text(code)
    if not sentence:
        assert read_experiment_file(path).tuner.own is not None
        return
    with pytest.raises(ConfigInvalid) as raised:
        read_experiment_file(path)
    assert sentence in str(raised.value)


def test_a_registered_algorithm_name_selects_a_custom_class(write, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = write(replace={"builtinTunerName: TPE": "builtinTunerName: demo"})
    with pytest.raises(ConfigInvalid, match='"demo" is not a built-in tuner'):
        read_experiment_file(path)
    register(RegisteredAlgorithm("tuner", "demo", "demo_tuner.Demo", "demo_tuner.V"), set())
    config = read_experiment_file(path)
    assert (config.tuner.name, config.tuner.own) == (
        "demo",
        UserClass("demo_tuner.Demo", None, "demo_tuner.V"),
    )
    registry_file().write_text("[]")
    with pytest.raises(ConfigInvalid, match="fix or remove"):
        read_experiment_file(path)
