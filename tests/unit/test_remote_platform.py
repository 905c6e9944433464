"""What platform remote checks without a connection, and the address that it has for keepers."""

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


def test_the_ssh_client_is_named_where_it_is_missing(a_remote_platform, monkeypatch):
    platform = a_remote_platform()
    platform.check_offline()
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    with pytest.raises(UserError, match=r"run `pip install 'trial-keeper\[remote\]'`"):
        platform.check_offline()


def test_pbt_needs_a_folder_that_all_machines_share(a_remote_platform, tmp_path):
    with pytest.raises(UserError, match="set all_checkpoint_dir in classArgs"):
        a_remote_platform(tuner=PBT).check_offline()


def test_pbt_with_such_a_folder_is_accepted(a_remote_platform):
    args = PBT["classArgs"] | {"all_checkpoint_dir": "/shared"}
    a_remote_platform(tuner=PBT | {"classArgs": args}).check_offline()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("no-such-host.invalid", "127.0.0.1"),  # only the configuration of ssh knows it
    ],
)
def test_without_a_route_keepers_use_the_connection(a_remote_platform, host, address):
    assert a_remote_platform(host).address_for_keepers() == address


def test_the_manager_has_the_address_that_the_file_names(a_remote_platform):
    assert a_remote_platform(nniManagerIp="192.0.2.1").address_for_keepers() == "192.0.2.1"
