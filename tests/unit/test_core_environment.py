"""The environment variables of a trial."""

from pathlib import Path

import pytest

from trial_keeper.core.environment import trial_environ
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.documents import TrialDocument
from trial_keeper.wire.workspace import AttemptFolder, Workspace

WORKSPACE = Workspace(Path("/mnt/exp"))
FOLDER = AttemptFolder(Path("/mnt/exp/trials/abcde/attempts/0/worker-0"))


def environ(container: dict[str, str] | None = None, gpu_indices: tuple[int, ...] | None = None) -> dict:
    trial = TrialDocument("abcde", 7, "python train.py", "/code/digits/", gpu_indices)
    return trial_environ(container or {}, "expABCDE", trial, FOLDER, WORKSPACE)


def test_a_trial_gets_the_variables_that_nni_documents() -> None:
    assert environ() == {
        "NNI_PLATFORM": "local",
        "NNI_EXP_ID": "expABCDE",
        "NNI_TRIAL_JOB_ID": "abcde",
        "NNI_TRIAL_SEQ_ID": "7",
        "NNI_SYS_DIR": "/mnt/exp/trials/abcde/attempts/0/worker-0",
        "NNI_OUTPUT_DIR": "/mnt/exp/trials/abcde/attempts/0/worker-0/output",
        "NNI_CHECKPOINT_DIR": "/mnt/exp/trials/abcde/checkpoints",
        "NNI_CODE_DIR": "/code/digits/",
        "PYTHONPATH": "/mnt/exp/sdk",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_trial_gets_a_seed_if_its_manager_sends_a_seed() -> None:
    trial = TrialDocument("abcde", 7, "python train.py", "/code/digits/", seed=2**32 - 1)
    assert trial_environ({"NNI_SEED": "1"}, "expABCDE", trial, FOLDER, WORKSPACE)["NNI_SEED"] == str(
        2**32 - 1
    )


def test_a_trial_receives_the_names_of_the_metrics_of_all_objectives() -> None:
    trial = TrialDocument("abcde", 7, "python train.py", "/code/", result_metrics=("accuracy", "ms"))
    assert TrialDocument.from_bytes(trial.to_bytes()) == trial
    around = {"NNI_RESULT_METRICS": '["outer"]'}
    made = trial_environ(around, "expABCDE", trial, FOLDER, WORKSPACE)
    assert made["NNI_RESULT_METRICS"] == '["accuracy", "ms"]'
    assert "NNI_RESULT_METRICS" not in environ(around)


def test_the_environment_keeps_the_variables_of_the_container() -> None:
    container = {"PATH": "/opt/bin", "PAI_TASK_INDEX": "0", "EMPTY": "", "TRIAL_KEEPERS": "mine"}
    assert environ(container).items() >= container.items()


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ("", "/mnt/exp/sdk"),
        ("/opt/trial-keeper/sdk", "/opt/trial-keeper/sdk:/mnt/exp/sdk"),
        ("src:/opt/lib", "src:/opt/lib:/mnt/exp/sdk"),
    ],
    ids=["set and empty", "one folder", "two folders"],
)
def test_the_sdk_comes_last_on_the_python_path(containers: str, expected: str) -> None:
    assert environ({"PYTHONPATH": containers})["PYTHONPATH"] == expected


def test_variables_of_the_keeper_override_variables_of_an_outer_trial() -> None:
    assert environ({"NNI_TRIAL_JOB_ID": "outer", "NNI_PLATFORM": "remote"})["NNI_TRIAL_JOB_ID"] == "abcde"


def test_the_token_is_never_passed_to_the_trial() -> None:
    settings = KeeperSettings("expABCDE", "abcde", "/mnt/exp", "s3cret", "abcde", collect_logs=True)
    passed_on = environ({"HOME": "/root", **settings.to_environ()})
    assert not [name for name in passed_on if name.startswith("TRIAL_KEEPER_")]
    assert "s3cret" not in "".join(passed_on.values())


def test_the_environment_of_the_keeper_itself_is_not_modified() -> None:
    container = {"TRIAL_KEEPER_TOKEN": "s3cret"}
    environ(container)
    assert container == {"TRIAL_KEEPER_TOKEN": "s3cret"}


@pytest.mark.parametrize(
    ("gpu_indices", "expected"),
    [((0,), "0"), ((2, 3), "2,3"), ((), "-1")],
    ids=["one GPU", "two GPUs", "no GPU may be seen"],
)
def test_a_trial_sees_only_its_assigned_gpus_in_pci_bus_order(
    gpu_indices: tuple[int, ...], expected: str
) -> None:
    made = environ({"CUDA_VISIBLE_DEVICES": "9"}, gpu_indices)
    assert (made["CUDA_VISIBLE_DEVICES"], made["CUDA_DEVICE_ORDER"]) == (expected, "PCI_BUS_ID")
    chosen = environ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, gpu_indices)
    assert chosen["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_a_trial_without_assigned_gpus_sees_the_gpus_of_the_container() -> None:
    assert environ({"CUDA_VISIBLE_DEVICES": "9"})["CUDA_VISIBLE_DEVICES"] == "9"
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} & environ().keys()
