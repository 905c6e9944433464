"""The training service of an experiment file, and the addresses at which keepers reach the manager."""

import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nni_manager.config.python_document import read_python_service_keys
from nni_manager.config.reader import read_experiment_file
from nni_manager.errors import UserError
from nni_manager.local_openpai.platform import parent_shown_at
from nni_manager.store.folders import WORLD_WRITABLE_STICKY, ExperimentFolder
from nni_manager.training_services.kubernetes.section import (
    AzureStorage,
    ClaimStorage,
    KubernetesConfig,
    NfsStorage,
    RoleConfig,
)
from nni_manager.training_services.local.section import LocalSection
from nni_manager.training_services.openpai.protocol import Storage
from nni_manager.training_services.openpai.section import PaiConfig
from nni_manager.training_services.platform import Platform, platform_of
from trial_keeper.wire.workspace import Workspace

CONFIG = """\
authorName: ada
experimentName: x
trialConcurrency: 1
trainingServicePlatform: pai
searchSpacePath: search_space.json
tuner: {{builtinTunerName: TPE}}
trial: {{command: "true", codeDir: ., gpuNum: 0, cpuNum: 1, memoryMB: 512, image: i, paiStorageConfigName: s,
         nniManagerNFSMountPath: ., containerNFSMountPath: /mnt/s}}
paiConfig: {{userName: ada, token: {token}, host: {host}}}
"""

# The address needs a scheme: in the second schema, a host without a scheme would be called with https.
ADDRESS = "http://192.0.2.1"


@pytest.fixture
def config(tmp_path):
    """Read an experiment file with the given host and token."""

    def read(host="192.0.2.1", token="first"):
        (tmp_path / "search_space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
        (tmp_path / "config.yml").write_text(CONFIG.format(host=host, token=token))
        return read_experiment_file(tmp_path / "config.yml")

    return read


def test_keepers_on_this_machine_connect_over_loopback(config):
    assert platform_of(config("local")).address_for_keepers() == "127.0.0.1"
    assert platform_of(config("127.0.0.1:9186")).address_for_keepers() == "127.0.0.1"
    assert Platform.address_to_listen_on("127.0.0.1") == "127.0.0.1"


def test_keepers_on_other_machines_use_the_address_that_the_user_configured(config):
    experiment = config("127.0.0.1").replace(nni_manager_ip="192.0.2.7")
    assert platform_of(experiment).address_for_keepers() == "192.0.2.7"
    assert Platform.address_to_listen_on("192.0.2.7") == "0.0.0.0"


def test_keepers_on_other_machines_use_the_manager_address_on_the_route_to_the_cluster(config):
    try:
        address = platform_of(config("192.0.2.1")).address_for_keepers()
    except UserError:
        pytest.skip("this machine has no network")
    with socket.create_server((address, 0)):
        pass  # listening succeeds only at an address of this machine


def test_a_cluster_host_name_that_cannot_be_resolved_is_refused(config):
    with pytest.raises(
        UserError, match=r"cannot find a route to OpenPAI at no\.such\.host\.invalid: .*; correct"
    ):
        platform_of(config("no.such.host.invalid")).address_for_keepers()


def test_an_experiment_uses_the_new_login_after_its_experiment_file_has_changed(config):
    stored = config()
    assert config(token="second").config_path == stored.config_path
    today = platform_of(stored).current_login()
    assert (today.token, today.source) == ("second", f" ({stored.config_path})")


def test_an_experiment_uses_the_new_login_even_if_other_parts_of_its_experiment_file_are_invalid(
    config, tmp_path
):
    stored = config()
    config(token="second")
    (tmp_path / "search_space.json").unlink()
    text = stored.config_path.read_text()
    stored.config_path.write_text(
        text.replace("codeDir: .", "codeDir: gone").replace("cpuNum: 1", "cpuNum: x")
    )
    assert platform_of(stored).current_login().token == "second"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (
            ("host: 192.0.2.1", "host: 192.0.2.9"),
            "whose login is for ada at 192.0.2.9: write ada and 192.0.2.1 there",
        ),
        (
            ("userName: ada", "userName: bob"),
            "whose login is for bob at 192.0.2.1: write ada and 192.0.2.1 there",
        ),
        (
            ("token: second", 'token: "two words"'),
            "config.yml:9: cannot use paiConfig.token: its value is not a token",
        ),
        (("token: second, ", ""), "which has no login: write exactly one of token and password"),
        (
            ("token: second", "token: second, passWord: p"),
            "which has both token and password: write exactly one",
        ),
        (("paiConfig: {", "paiConfig: ["), "config.yml:9: cannot read config.yml: "),
    ],
)
def test_an_experiment_uses_the_stored_login_and_reports_why_the_login_in_its_file_is_unusable(
    config, written, reason
):
    stored = config()
    config(token="second")
    text = stored.config_path.read_text()
    assert written[0] in text
    stored.config_path.write_text(text.replace(*written))
    login = platform_of(stored).current_login()
    assert login.token == "first"
    assert str(stored.config_path) in login.source
    assert reason in login.source


def section_with(stored, **service):
    """The platform section of the stored experiment, with the login from a configuration in Python."""
    document = {"trainingService": {"platform": "openpai", **service}, "trialConcurrency": "wrong"}
    return platform_of(stored).section_with_login(partial(read_python_service_keys, document))


def test_a_login_in_python_replaces_the_stored_login_even_if_another_part_of_the_configuration_is_invalid(
    config, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    stored, here = config(ADDRESS).cluster, {"host": ADDRESS, "username": "ada"}
    assert section_with(config(ADDRESS), **here, password="p", caFile="ca.pem") == replace(
        stored, token=None, password="p", ca_file=tmp_path / "ca.pem"
    )
    assert section_with(config(ADDRESS), **here) == stored
    assert section_with(config(ADDRESS)) == stored


@pytest.mark.parametrize(
    ("service", "reason"),
    [
        (
            {"username": "bob"},
            "whose login is for bob at http://192.0.2.1: write ada and http://192.0.2.1 there",
        ),
        (
            {"host": "http://192.0.2.9"},
            "whose login is for ada at http://192.0.2.9: write ada and http://192.0.2.1 there",
        ),
        ({"password": "p"}, "which has both token and password: write exactly one"),
        ({"token": "two words"}, "cannot use config.training_service.token: its value is not a token"),
    ],
)
def test_an_unusable_login_in_a_python_configuration_is_refused(config, service, reason):
    with pytest.raises(UserError, match=reason):
        section_with(config(ADDRESS), **{"host": ADDRESS, "username": "ada", "token": "second", **service})


def test_the_remedy_for_a_refused_login_of_a_python_experiment_is_a_resume_with_a_new_login(config):
    stored = config().replace(config_path=Path("/home/ada/experiment.config"))
    login = platform_of(stored).current_login()
    assert login.token == "first"
    assert "stop the experiment, and call Experiment(config, id=ID).resume()" in login.source


def test_an_experiment_uses_the_stored_login_if_its_experiment_file_is_missing(config):
    stored = config()
    stored.config_path.unlink()
    login = platform_of(stored).current_login()
    assert login.token == "first"
    assert f"cannot read {stored.config_path}: there is no such file" in login.source


@pytest.mark.parametrize(
    ("storage", "mount", "shown"),
    [("/data", "/mnt/s", "/data"), ("/data/a/b", "/mnt/s/a/b", "/data"), ("/b", "/mnt/s/b", "/")],
)
def test_the_local_folder_of_a_storage_is_derived_from_the_local_and_the_container_path(
    config, storage, mount, shown
):
    pai = replace(config().cluster, storage=Path(storage), mount=mount)
    assert isinstance(pai, PaiConfig)
    assert parent_shown_at(pai, Storage("s", "/mnt/s")) == Path(shown)


def test_a_local_path_and_a_container_path_are_refused_if_they_end_differently(config):
    pai = replace(config().cluster, storage=Path("/data"), mount="/mnt/s/a")
    with pytest.raises(UserError, match="both must end with a; write containerNFSMountPath: /mnt/s"):
        parent_shown_at(pai, Storage("s", "/mnt/s"))


ROLE = RoleConfig("worker", 1, "true", "i", 0, 1, 100)
AZURE = AzureStorage("account", "share", "vault", "key")
NFS = KubernetesConfig("frameworkcontroller", NfsStorage("nas", "/nni"), (ROLE,))


def on_kubernetes(config, **changed):
    return config().replace(training_service="frameworkcontroller", cluster=replace(NFS, **changed))


def test_the_local_path_of_the_storage_comes_from_the_experiment_file(config, tmp_path):
    assert platform_of(config()).storage_here() == tmp_path
    assert (
        platform_of(config().replace(training_service="local", cluster=LocalSection())).storage_here() is None
    )
    claim = ClaimStorage(Path("/data"), "nni")
    assert platform_of(on_kubernetes(config, storage=claim)).storage_here() == Path("/data")
    assert platform_of(on_kubernetes(config, storage=AZURE)).storage_here() is None, (
        "Azure Files is accessed by its API"
    )
    with pytest.raises(UserError, match="cannot find a mount of nas:/nni on this machine"):
        platform_of(on_kubernetes(config)).storage_here()


def test_the_checkpoints_folder_is_inside_the_workspace_and_is_created_only_for_pbttuner(config, tmp_path):
    folder = ExperimentFolder(tmp_path / "experiments" / "EXPT")
    folder.make(tmp_path)
    elsewhere = config()
    population = elsewhere.replace(tuner=replace(elsewhere.tuner, name="PBTTuner"))
    assert platform_of(elsewhere).checkpoints(folder) == Path("/mnt/s/EXPT/checkpoints")
    here = tmp_path / "EXPT" / "checkpoints"
    assert not here.exists(), "only PBTTuner creates it"
    for _ in range(2):  # The second call simulates a resume.
        assert platform_of(population).checkpoints(folder) == Path("/mnt/s/EXPT/checkpoints")
    assert here.stat().st_mode & 0o7777 == WORLD_WRITABLE_STICKY
    assert (
        platform_of(population.replace(training_service="local", cluster=LocalSection())).checkpoints(folder)
        == here
    )
    assert platform_of(on_kubernetes(config)).checkpoints(folder) == Path("/tmp/mount/EXPT/checkpoints")


def test_the_error_for_missing_azure_clients_contains_the_install_command(config, tmp_path, monkeypatch):
    module = "nni_manager.training_services.kubernetes.azure_share"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "azure.storage.fileshare", None)
    with pytest.raises(UserError, match=r"run `pip install 'trial-keeper\[azure\]'`"):
        platform_of(on_kubernetes(config, storage=AZURE)).share(Workspace(tmp_path))
    assert platform_of(on_kubernetes(config)).share(Workspace(tmp_path)) is None
    assert platform_of(config()).share(Workspace(tmp_path)) is None
