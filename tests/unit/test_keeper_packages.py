"""The recorded environment of a trial: host, node, and the packages in the search path of the trial's interpreter."""

import hashlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trial_keeper.cluster_environment import node_name
from trial_keeper.host.packages import Packages, installed
from trial_keeper.wire.workspace import AttemptFolder, Workspace


@pytest.fixture
def workspace(tmp_path):
    (tmp_path / "packages").mkdir()
    return Workspace(tmp_path)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "attempt/.nni").mkdir(parents=True)
    return AttemptFolder(tmp_path / "attempt")


def report(folder, path, version="3.11.2"):
    folder.python_json.write_text(json.dumps({"version": version, "path": path}))


def test_the_package_list_has_all_distributions_that_importlib_metadata_finds():
    found = dict(line.split("==") for line in installed(sys.path))
    for each in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower()
        if "editable" not in str(each.locate_file("")):
            assert name in found
    assert found["pytest"] == importlib.metadata.version("pytest")


def test_only_the_first_version_of_a_package_is_listed_if_two_folders_of_the_search_path_have_it(tmp_path):
    for place, version in (("a", "2.0"), ("b", "1.0")):
        (tmp_path / place / f"Some_Package-{version}.dist-info").mkdir(parents=True)
    (tmp_path / "b/old-0.1-py3.7.egg-info").touch()
    paths = [str(tmp_path / place) for place in ("a", "b", "missing", "")]
    assert installed(paths) == ["old==0.1", "some-package==2.0"]


def test_the_package_list_is_written_again_only_if_it_changes(workspace, folder, tmp_path):
    site = tmp_path / "site"
    (site / "numpy-1.26.4.dist-info").mkdir(parents=True)
    report(folder, [str(site)])
    packages = Packages(workspace, {"NODE_NAME": "gpu-7"})

    first = packages.of(folder)

    assert (first.python, first.node) == ("3.11.2", "gpu-7")
    (written,) = workspace.packages.iterdir()
    assert written.name == first.packages == hashlib.sha256(b"numpy==1.26.4\n").hexdigest()
    before = written.stat()
    assert packages.of(folder) == Packages(workspace, {"NODE_NAME": "gpu-7"}).of(folder) == first
    assert written.stat() == before
    (site / "torch-2.1.0.dist-info").mkdir()
    assert packages.of(folder).packages != first.packages
    assert len(list(workspace.packages.iterdir())) == 2


def test_the_keeper_records_only_host_and_node_if_there_is_no_interpreter_report(workspace, folder):
    packages = Packages(workspace, {})
    assert packages.of(folder) == packages.here
    assert packages.here.host
    assert not packages.here.python


@given(content=st.binary(max_size=200) | st.builds(lambda each: json.dumps(each).encode(), st.recursive(
    st.none() | st.text() | st.integers() | st.just("version"), lambda of: st.lists(of) | st.dictionaries(
        st.sampled_from(["version", "path"]) | st.text(), of))))  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_keeper_records_the_host_even_if_the_interpreter_report_is_invalid(workspace, folder, content):
    folder.python_json.write_bytes(content)
    found = Packages(workspace, {}).of(folder)
    assert found.host == Packages(workspace, {}).here.host


def test_the_keeper_records_the_package_digest_even_if_the_workspace_is_not_writable(folder, tmp_path):
    report(folder, [str(tmp_path)])
    assert Packages(Workspace(Path("/proc/none")), {}).of(folder).packages


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, ""),
        ({"NODE_NAME": "node-1"}, "node-1"),
        ({"SLURMD_NODENAME": "c12"}, "c12"),
        (
            {
                "PAI_CURRENT_TASK_ROLE_NAME": "Worker_A",
                "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": "1",
                "PAI_HOST_IP_workera_1": "10.0.0.7",
            },
            "10.0.0.7",
        ),
    ],
)
def test_the_node_name_comes_from_the_environment_variables_of_the_cluster(environ, name):
    assert node_name(environ) == name
