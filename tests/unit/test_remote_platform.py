"""The offline checks of the remote platform, and the manager address that keepers use."""

import sys

import pytest
from real_experiment import RealExperiment

from nni_manager.errors import UserError
from nni_manager.training_services.platform import platform_of

PBT = {"builtinTunerName": "PBTTuner", "classArgs": {"optimize_mode": "maximize"}}


@pytest.fixture
def a_remote_platform(tmp_path):
    def make(host="127.0.0.1", **config):
        pytest.importorskip("asyncssh")
        machines = [{"ip": host, "username": "ada"}]
        experiment = RealExperiment(
            tmp_path, "", trainingServicePlatform="remote", machineList=machines, **config
        )
        return platform_of(experiment.config)

    return make


@pytest.mark.slow
def test_the_error_for_a_missing_ssh_client_contains_the_install_command(a_remote_platform, monkeypatch):
    platform = a_remote_platform()
    platform.check_offline()
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    with pytest.raises(UserError, match=r"run `pip install 'trial-keeper\[remote\]'`"):
        platform.check_offline()


def test_pbt_requires_a_checkpoint_folder_that_all_machines_share(a_remote_platform, tmp_path):
    with pytest.raises(UserError, match="set all_checkpoint_dir in classArgs"):
        a_remote_platform(tuner=PBT).check_offline()


def test_pbt_with_a_shared_checkpoint_folder_is_accepted(a_remote_platform):
    args = PBT["classArgs"] | {"all_checkpoint_dir": "/shared"}
    a_remote_platform(tuner=PBT | {"classArgs": args}).check_offline()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("no-such-host.invalid", "127.0.0.1"),  # only the configuration of ssh can resolve this name
    ],
)
def test_keepers_use_the_loopback_address_if_the_host_is_local_or_cannot_be_resolved(
    a_remote_platform, host, address
):
    assert a_remote_platform(host).address_for_keepers() == address


def test_keepers_use_the_manager_address_in_the_experiment_file(a_remote_platform):
    assert a_remote_platform(nniManagerIp="192.0.2.1").address_for_keepers() == "192.0.2.1"
