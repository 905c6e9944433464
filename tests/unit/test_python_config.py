"""The configuration of an experiment in Python. It equals the configuration of a file, and its errors use Python names."""

import copy
import json
import math
import warnings
from pathlib import Path

import numpy
import pytest

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.dialect import EACH
from nni_manager.config.document import as_yaml
from nni_manager.config.python_document import to_python_names
from nni_manager.config.reader import read_experiment_file
from nni_manager.config.v2 import aliases_on, keys_of_v2
from nni_manager.errors import UserError
from nni_manager.experiment import (
    AlgorithmConfig,
    AliasHint,
    CustomAlgorithmConfig,
    ExperimentConfig,
    FrameworkAttemptCompletionPolicy,
    FrameworkControllerConfig,
    FrameworkControllerRoleConfig,
    K8sAzureStorageConfig,
    K8sNfsConfig,
    K8sPvcConfig,
    K8sStorageConfig,
    KubeflowConfig,
    KubeflowRoleConfig,
    LocalConfig,
    OpenpaiConfig,
)
from nni_manager.experiment.aliases import NoSuchField
from nni_manager.experiment.platform_section import PlatformUnknown

SPACE = {"lr": {"_type": "loguniform", "_value": [0.001, 1]}}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "storage").mkdir()
    return tmp_path


def local(**fields):
    config = ExperimentConfig(
        "local", experiment_name="digits", trial_command="python3 train.py", search_space=SPACE
    )
    config.tuner.name = "TPE"
    config.trial_concurrency = 2
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def framework(**fields):
    role = FrameworkControllerRoleConfig(
        name="worker", task_number=1, command="python3 train.py", gpu_number=0, cpu_number=1, memory_size="4g",
        docker_image="me/train:1",
        framework_attempt_completion_policy=FrameworkAttemptCompletionPolicy(
            min_failed_task_count=1, min_succeed_task_count=1
        ),
    )  # fmt: skip
    service = FrameworkControllerConfig(
        storage=K8sNfsConfig(server="10.0.0.1", path="/nni"), task_roles=[role], service_account_name="fc"
    )
    return local(training_service=service, trial_command=None, **fields)


def openpai():
    service = OpenpaiConfig(
        host="openpai.example.com", username="ada", token="a-token", trial_cpu_number=4, trial_memory_size="8 GB",
        docker_image="me/train:1", virtual_cluster="default", local_storage_mount_point=Path("storage"),
        container_storage_mount_point="/mnt/confignfs-data", storage_config_name="confignfs-data",
    )  # fmt: skip
    return local(training_service=service, trial_gpu_number=1, max_experiment_duration="0.5h")


def kubeflow():
    role = KubeflowRoleConfig(
        replicas=2, command="python3 w.py", cpu_number=1, memory_size=512, docker_image="me/w:1"
    )
    service = KubeflowConfig(
        operator="tf-operator",
        api_version="v1",
        worker=role,
        storage=K8sPvcConfig(path="storage", claim_name="nni"),
    )
    return local(training_service=service, trial_command=None, assessor={"name": "Medianstop"})


@pytest.mark.parametrize("make", [local, framework, openpai, kubeflow])
def test_a_configuration_in_python_equals_the_configuration_of_an_equivalent_file(place, make):
    config = make()
    (place / "digits.yml").write_text(as_yaml(config.document()))
    # Warnings and paths depend on the source, so the test does not compare them.
    differs = {"config_path": Path(), "expansions": (), "warnings": ()}
    from_file = read_experiment_file(place / "digits.yml").replace(**differs)
    assert config.checked().replace(**differs) == from_file
    assert copy.deepcopy(config) == config


PARTS = {
    ("tuner",): AlgorithmConfig,
    ("trainingService", "taskRoles", EACH): FrameworkControllerRoleConfig,
    (
        "trainingService",
        "taskRoles",
        EACH,
        "frameworkAttemptCompletionPolicy",
    ): FrameworkAttemptCompletionPolicy,
    ("trainingService", "worker"): KubeflowRoleConfig,
    ("trainingService", "storage"): K8sStorageConfig,
}
SERVICES = {
    "local": LocalConfig,
    "openpai": OpenpaiConfig,
    "frameworkcontroller": FrameworkControllerConfig,
    "kubeflow": KubeflowConfig,
}
# The reader handles these keys itself. Its tables do not contain them, so the test leaves them out.
ANSWERED = {"searchSpace", "sharedStorage", "experimentType", "openpaiConfig"}


@pytest.mark.parametrize("platform", SERVICES)
def test_the_fields_correspond_to_the_keys_of_a_v2_file(platform):
    places = {key.path for key in keys_of_v2(platform)}
    places |= {place for place in aliases_on(platform) if any(place[:-1] == each[:-1] for each in places)}
    if platform == "local":
        homes = {(): ExperimentConfig, ("tuner",): AlgorithmConfig, ("trainingService",): LocalConfig}
    else:
        homes = {
            place: part
            for place, part in PARTS.items()
            if any(each[: len(place)] == place for each in places)
        }
        homes["trainingService",] = SERVICES[platform]
    for place, part in homes.items():
        keys = {
            each[len(place)] for each in places if each[: len(place)] == place and len(each) > len(place)
        } - {EACH}
        fields = set(
            part(**{name: platform if name == "platform" else 0 for name in part.field_names()}).document()
        )
        known = {key for key in keys if part.field_named(_snake(key)) is not None}
        assert known == keys
        assert fields - keys - ANSWERED - {"reuseMode"} == set(), part


def _snake(key):
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in key)


def diagnostics_of(config):
    with pytest.raises(ConfigInvalid) as caught:
        config.validate()
    return {error.key: error.message for error in caught.value.diagnostics}


def test_all_missing_fields_are_reported_together_with_python_examples():
    assert diagnostics_of(ExperimentConfig("frameworkcontroller")) == {
        "config.trial_concurrency": "cannot do without config.trial_concurrency: it must be a whole number from 1 to 99999; "
        "write e.g. trial_concurrency = 2",
        "config.search_space": "cannot do without config.search_space: it must be a mapping of hyper-parameters; write e.g. "
        "search_space = {'lr': {'_type': 'loguniform', '_value': [0.001, 1]}}",
        "config.training_service.storage.storage_type": "cannot do without config.training_service.storage.storage_type: trials "
        "require a storage that all machines share; write e.g. "
        "storage = {'storage_type': 'nfs', 'server': '10.10.10.10', 'path': '/var/nfs/nni'}",
        "config.training_service.task_roles": "cannot do without config.training_service.task_roles: it must be a list of roles; "
        "write e.g. task_roles = [{'name': 'worker', 'task_number': 1, 'command': 'python3 train.py', 'gpu_number': 0, "
        "'cpu_number': 1, 'memory_size': 8192, 'docker_image': '...'}], or name a template in "
        "config.training_service.config_path",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"trial_concurrency": "2"},
         'config.trial_concurrency: "2" is not a whole number from 1 to 99999; write e.g. trial_concurrency = 2'),
        ({"experiment_name": 5}, "config.experiment_name: 5 is a number, but text is required; write '5'"),
        ({"debug": "yes"}, 'config.debug: "yes" is not true or false; write e.g. debug = False'),
        ({"max_experiment_duration": "1 hour"}, "write e.g. max_experiment_duration = '1h'"),
        ({"tuner": {"name": "TPEE"}}, 'config.tuner.name: "TPEE" is not a built-in tuner; did you mean TPE?'),
        ({"tuner": {"name": "TPE", "class_args": {"optimize_mode": "max"}}},
         'config.tuner.class_args.optimize_mode: "max" is not maximize or minimize; write e.g. '
         "class_args['optimize_mode'] = 'maximize'"),
        ({"tuner": CustomAlgorithmConfig(class_name="Mine")},
         "write module and class as one name, such as class_name = 'my_tuner.Mine'"),
        ({"search_space": {"lr": {"_type": "unifrm", "_value": [0, 1]}}},
         'config.search_space.lr: "unifrm" is not a type; did you mean uniform?'),
        ({"search_space": {"trialCommand": {"_type": "uniform", "_value": [1, 0]}}},
         "config.search_space.trialCommand: low 1 is not below"),
        ({"search_space": "space.json"}, 'the search space: "space.json" is not a mapping'),
        ({"search_space": {"lr": {"_type": "choice", "_value": [object()]}}},
         "config.search_space.lr[0]: it is an object of type object"),
        ({"search_space": {"lr": {"_type": "uniform", "_value": [0, math.inf]}}},
         "config.search_space.lr[1]: it is a number that is not finite"),
        ({"search_space": None, "search_space_file": "no.json"}, "config.search_space_file: there is no "),
        ({"trial_code_directory": "nowhere"}, "config.trial_code_directory: there is no folder "),
        ({"training_service": "local"}, "write e.g. training_service = {'platform': 'local'}"),
        ({"training_service": [LocalConfig()] * 2}, "config.training_service: several at once are not supported"),
        ({"training_service": LocalConfig(gpu_indices="a")}, "config.training_service.gpu_indices: \"a\" is not GPU numbers"),
        ({"shared_storage": {"a": 1}}, "config.shared_storage: it is not supported"),
        ({"experiment_type": "nas"}, "config.experiment_type: architecture search is not supported"),
        ({"warm_imports": ["numpy"]}, "turn on config.training_service.reuse_mode as well"),
        ({"advisor": {"name": "BOHB"}}, "config.tuner together with advisor"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)  # fmt: skip
def test_the_error_for_an_invalid_value_contains_its_field_and_an_example(fields, expected):
    assert any(expected in message for message in diagnostics_of(local(**fields)).values())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda service: setattr(service.task_roles[0], "memory_size", "4x"),
         'task_roles[0].memory_size: "4x" is not a whole number of MB, or a size such as 8gb; write e.g. memory_size = 8192'),
        (lambda service: setattr(service.task_roles[0], "framework_attempt_completion_policy", None),
         "framework_attempt_completion_policy = {'min_failed_task_count': 1, 'min_succeed_task_count': -1}"),
        (lambda service: setattr(service, "task_roles", service.task_roles[0]), "task_roles: {"),
        (lambda service: setattr(service, "task_roles", [None]), "task_roles[0]: null is not a mapping"),
        (lambda service: setattr(service.storage, "server", "{your_nfs_server_ip}"), "is a placeholder of an example"),
        (lambda service: setattr(service.storage, "claim_name", "x"), "storage.claim_name: it applies to storage_type = 'pvc'"),
        (lambda service: setattr(service, "storage", K8sAzureStorageConfig(azure_account="acct")), "azure_share = 'nni'"),
    ],
)  # fmt: skip
def test_an_error_in_a_kubernetes_section_has_the_path_of_the_field(change, expected):
    config = framework()
    change(config.training_service)
    assert any(expected in message for message in diagnostics_of(config).values())


def test_errors_and_representations_of_a_configuration_contain_no_secret():
    config = openpai()
    config.training_service.token = 12345
    assert "12345" not in str(diagnostics_of(config))
    assert "12345" not in repr(config)


def test_a_value_that_contains_itself_is_refused():
    space = {}
    space["lr"] = space
    assert "contains itself" in diagnostics_of(local(search_space=space))["config"]


def test_a_field_that_is_nested_too_deeply_is_refused():
    space = {"lr": {"_type": "choice", "_value": json.loads("[" * 100 + "]" * 100)}}
    said = diagnostics_of(local(search_space=space))["config.search_space"]
    assert said == "cannot use config.search_space: it is nested more than 100 levels deep; make it flatter"


def test_tuples_and_ranges_and_paths_and_numpy_numbers_are_accepted():
    space = {
        "lr": {"_type": "choice", "_value": (numpy.float64(0.5), Path("a"))},
        "n": {"_type": "choice", "_value": range(2)},
    }
    checked = local(
        search_space=space, max_trial_number=numpy.int64(3), trial_code_directory=Path("storage")
    ).checked()
    assert checked.search_space_raw["lr"]["_value"] == [0.5, "a"]
    assert checked.search_space_raw["n"]["_value"] == [0, 1]
    assert checked.max_trial_number == 3
    json.dumps(checked.search_space_raw)


def test_the_default_experiment_name_is_the_name_of_the_program(monkeypatch):
    monkeypatch.setattr("__main__.__file__", "/home/ada/search.py", raising=False)
    assert local(experiment_name=None).checked().experiment_name == "search"
    monkeypatch.delattr("__main__.__file__")
    assert local(experiment_name=None).checked().experiment_name == "experiment"


def test_a_field_in_the_spelling_of_experiment_files_is_accepted_with_a_warning():
    role = FrameworkControllerRoleConfig()
    with pytest.warns(
        AliasHint, match="gpuNumber of FrameworkControllerRoleConfig is read as gpu_number"
    ) as caught:
        role.gpuNumber = 1
    assert caught[0].filename == __file__
    with pytest.warns(AliasHint):
        assert role.gpuNumber == role.gpu_number == 1
    with pytest.warns(AliasHint, match="dockerImage"):
        assert KubeflowRoleConfig(dockerImage="me/train:1").docker_image == "me/train:1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NNI's alternative names are not misspelled, so they cause no hint.
        assert K8sStorageConfig(storage="nfs").storage_type == "nfs"


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda: setattr(ExperimentConfig("local"), "trial_comand", "x"), "does not exist; did you mean trial_command?"),
        (lambda: ExperimentConfig("local", max_trials=3), "cannot set max_trials of ExperimentConfig"),
        (lambda: setattr(ExperimentConfig("kubeflow"), "operator", "x"),
         "it is a field of training_service; set training_service.operator"),
        (lambda: setattr(AlgorithmConfig(), "optimize_mode", "x"),
         "it is an argument of the algorithm; write class_args['optimize_mode']"),
        (lambda: LocalConfig().gpus, "cannot set gpus of LocalConfig"),
        (lambda: setattr(ExperimentConfig("local"), "name", "x"), "did you mean experiment_name?"),
        (lambda: setattr(ExperimentConfig("local"), "assessor", {"nam": "x"}), "cannot set nam of AlgorithmConfig"),
    ],
)  # fmt: skip
def test_setting_an_unknown_field_raises_an_error(write, expected):
    with pytest.raises(NoSuchField) as caught:
        write()
    assert expected in str(caught.value)
    assert isinstance(caught.value, AttributeError)


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        (
            "aml",
            "cannot run an experiment on 'aml': Azure Machine Learning is not supported; use one of local, openpai,",
        ),
        ("pai", 'the name of OpenPAI is "openpai"; use that'),
        ("localhost", "there is no such platform; use one of local,"),
        (["local", "remote"], "an experiment runs on one platform; use one of local,"),
    ],
)
def test_the_error_for_an_unknown_platform_lists_the_supported_platforms(platform, expected):
    with pytest.raises(PlatformUnknown) as caught:
        ExperimentConfig(platform)
    assert expected in str(caught.value)


def test_a_list_that_contains_one_platform_selects_this_platform():
    assert ExperimentConfig(["local"]).training_service == LocalConfig()


def test_a_training_service_may_be_given_with_its_own_platform_but_not_with_another_platform():
    config = ExperimentConfig("local", training_service={"platform": "local", "reuse_mode": False})
    assert config.training_service.reuse_mode is False
    with pytest.raises(
        UserError, match="cannot use the platform 'local' together with training_service = Slurm"
    ):
        ExperimentConfig("local", training_service={"platform": "slurm"})


def test_an_algorithm_accepts_its_name_as_the_only_positional_argument():
    assert AlgorithmConfig("TPE", class_args={"seed": 1}) == AlgorithmConfig(
        name="TPE", class_args={"seed": 1}
    )
    for call in (
        lambda: AlgorithmConfig("TPE", {}),
        lambda: LocalConfig(True),
        lambda: ExperimentConfig("local", 2),
    ):
        with pytest.raises(
            UserError, match="a value without a name belongs to no field; write it with a name"
        ):
            call()


def test_a_change_of_the_configuration_after_the_start_of_the_experiment_causes_a_warning(capsys):
    config = local()
    start = config.document()
    config.warn_of_changes_since(start)
    config.trial_concurrency, config.tuner.name, config.description = 5, "Random", "late"
    config.warn_of_changes_since(start)
    assert capsys.readouterr().err == (
        "WARNING: config.description, config.trial_concurrency, config.tuner changed after the start, without effect; call an "
        "update_...() method, or start another experiment\n"
    )


@pytest.mark.parametrize(
    ("of_files", "of_python"),
    [
        ("cannot use trial.command: it is bad; write searchSpacePath: s.json, or set reuse: false",
         "cannot use config.trial_command: it is bad; write search_space_file = 's.json', or set reuse_mode = False"),
        ('cannot use maxTrialNum: "maxTrialNum" is bad', 'cannot use config.max_trial_number: "maxTrialNum" is bad'),
        ("lower gpuNum, or choose another logDir", "lower trial_gpu_number, or choose another experiment_working_directory"),
        ("localConfig.gpuIndices: reuse it", "config.training_service.gpu_indices: reuse it"),
    ],
)  # fmt: skip
def test_file_keys_in_error_messages_are_replaced_by_python_names(of_files, of_python):
    assert to_python_names(of_files) == of_python
