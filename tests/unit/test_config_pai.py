"""Experiment files for OpenPAI, and one error message for each possible error."""

import json
import os
from pathlib import Path

import pytest
import tls_files
from openpai_jobs import JOB, WORKER, a_job, text_of

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.document import MAX_BYTES
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.reader import read_experiment_file
from nni_manager.errors import InternalError

# The example of an experiment file on NNI's page "Run an Experiment on OpenPAI".
PAGE = """\
authorName: your_name
experimentName: auto_mnist
# how many trials could be concurrently running
trialConcurrency: 2
# maximum experiment running duration
maxExecDuration: 3h
# empty means never stop
maxTrialNum: 100
# choice: local, remote, pai
trainingServicePlatform: pai
# search space file
searchSpacePath: search_space.json
# choice: true, false
useAnnotation: true
tuner:
  builtinTunerName: TPE
  classArgs:
    optimize_mode: maximize
trial:
  command: python3 mnist.py
  codeDir: ~/nni/examples/trials/mnist-annotation
  gpuNum: 0
  cpuNum: 1
  memoryMB: 8196
  image: msranni/nni:latest
  virtualCluster: default
  nniManagerNFSMountPath: /local/mnt
  containerNFSMountPath: /mnt/confignfs-data
  paiStorageConfigName: confignfs-data
# Configuration to access OpenPAI Cluster
paiConfig:
  userName: your_pai_nni_user
  token: your_pai_token
  host: 10.1.1.1
  # optional, experimental feature.
  reuse: true
"""


@pytest.fixture
def good(tmp_path):
    """The example file of NNI's page without annotations, with an account and existing folders."""
    (tmp_path / "storage").mkdir()
    return (
        PAGE.replace("useAnnotation: true", "useAnnotation: false")
        .replace("~/nni/examples/trials/mnist-annotation", ".")
        .replace("/local/mnt", "storage")
        .replace("your_pai_nni_user", "ada")
        .replace("your_pai_token", "s3cret")
    )


@pytest.fixture
def write(tmp_path, good):
    """Writes the valid experiment file with replacements, and returns the path."""

    def write_file(replace=(), text=None):
        text = good if text is None else text
        for old, new in dict(replace).items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
        path = tmp_path / "experiment.yml"
        path.write_text(text)
        return path

    return write_file


@pytest.fixture
def diagnostics(write):
    """The errors of a file, one per line, without the folder in the paths."""

    def lines(*args, **kwargs):
        path = write(*args, **kwargs)
        with pytest.raises(ConfigInvalid) as caught:
            read_experiment_file(path)
        return [line.replace(f"{path.parent}/", "") for line in str(caught.value).splitlines()]

    return lines


def test_the_completed_example_of_nnis_openpai_page_is_accepted(write, tmp_path):
    config = read_experiment_file(write())
    assert config.training_service == "pai"
    assert config.trial_command == "python3 mnist.py"
    assert (config.trial_gpu_number, config.reuse_mode) == (0, True)
    pai = config.cluster
    assert (pai.host, pai.user, pai.token, pai.password) == ("10.1.1.1", "ada", "s3cret", None)
    assert (pai.storage, pai.mount) == (tmp_path / "storage", "/mnt/confignfs-data")
    assert (pai.image, pai.storage_name, pai.virtual_cluster) == (
        "msranni/nni:latest",
        "confignfs-data",
        "default",
    )
    assert (pai.gpu, pai.cpu, pai.memory_mb, pai.job_file) == (0, 1, 8196, None)
    assert ExperimentSpec.from_json(config.to_json()) == config


def test_every_error_in_the_unedited_example_of_nnis_openpai_page_has_a_remedy(
    diagnostics, monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = diagnostics(text=PAGE)
    expected = [
        "experiment.yml:21: cannot use trial.codeDir: there is no folder nni/examples/trials/mnist-annotation",
        "experiment.yml:27: cannot use trial.nniManagerNFSMountPath: there is no folder /local/mnt; mount the storage there",
        "experiment.yml:32: cannot use paiConfig.userName: your_pai_nni_user is a placeholder of an example",
        "experiment.yml:33: cannot use paiConfig.token: your_pai_token is a placeholder of an example",
    ]
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


def test_annotations_override_the_search_space_in_the_example_of_nnis_openpai_page(write, tmp_path):
    path = write({"useAnnotation: false": "useAnnotation: true"})
    (tmp_path / "mnist.py").write_text("'''@nni.variable(nni.choice(1, 2), name=x)'''\nx = 1\n")
    # The storage is below the code folder, but its files are not code and must not be read.
    (tmp_path / "storage" / "old.py").write_text("'@nni.what()'")
    (tmp_path / "search_space.json").unlink()
    config = read_experiment_file(path)
    assert config.is_annotated
    assert config.search_space_raw == {"mnist/x/choice": {"_type": "choice", "_value": [1, 2]}}
    assert config.warnings == (
        "useAnnotation: true takes precedence over searchSpacePath: the search space is that of the annotations in trial.codeDir",
    )
    assert ExperimentSpec.from_json(config.to_json()) == config


@pytest.mark.parametrize("user", ["  userName: your_pai_user\n", "  userName:\n", ""])
def test_local_openpai_requires_neither_an_account_nor_an_existing_storage(write, user):
    config = read_experiment_file(
        write(
            {
                "host: 10.1.1.1": "host: local",
                "  token: s3cret\n": "",
                "  userName: ada\n": user,
                "MountPath: storage": "MountPath: not/yet",
            }
        )
    )
    assert config.cluster.is_local
    assert ExperimentSpec.from_json(config.to_json()) == config


@pytest.mark.parametrize("user", ["  userName:\n", ""])
def test_an_openpai_cluster_requires_an_account_name(diagnostics, user):
    (line,) = diagnostics({"  userName: ada\n": user})
    assert (
        "cannot do without paiConfig.userName: it must be the name of your OpenPAI account; write e.g. userName: ada"
        in line
    )


def test_the_repr_of_a_config_contains_no_secret(write):
    assert "s3cret" not in repr(read_experiment_file(write()))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("token: s3cret", "token: 'a b'", "cannot use paiConfig.token: its value is not a token"),
        ("token: s3cret", "passWord: 12", "cannot use paiConfig.passWord: without quotes YAML reads its value as a number"),
        ("token: s3cret", "token: a\n  passWord: b", "cannot log in to OpenPAI: paiConfig.token and paiConfig.passWord are both"),
        ("  token: s3cret\n", "", "cannot log in to OpenPAI: neither of paiConfig.token and paiConfig.passWord is set"),
        ("  image: msranni/nni:latest\n", "", "cannot do without trial.image: each job on OpenPAI requires it"),
        ("  cpuNum: 1\n", "", "cannot do without trial.cpuNum"),
        ("cpuNum: 1", "cpuNum: 0", "cannot use trial.cpuNum: 0 is not a whole number from 1"),
        ("memoryMB: 8196", "memoryMB: 8q", 'cannot use trial.memoryMB: "8q" is not a whole number of MB'),
        ("memoryMB: 8196", "memoryMB: 99", "cannot use trial.memoryMB: 99 is not a whole number of MB, at least 100"),
        ("memoryMB: 8196", "memoryMB: 8196\n  shmMB: 64", "cannot use trial.shmMB: only OpenPAI's job files can request"),
        ("memoryMB: 8196", "memoryMB: 8196\n  dataDir: hdfs://1.2.3.4:9000/x", "OpenPAI no longer has HDFS; read data"),
        ("  image: m", "  image: '${your image}'\n  paiStoragePlugin: m", "${your image} is a placeholder of an"),
        ("memoryMB: 8196", "memoryMb: 8196", "did you mean memoryMB?"),
        ("nniManagerNFSMountPath: storage", "nniManagerNFSMountPath: none", "there is no folder none; mount"),
        ("containerNFSMountPath: /mnt/confignfs-data", "containerNFSMountPath: data", "is not an absolute path in"),
        ("containerNFSMountPath: /mnt/confignfs-data", "containerNFSMountPath: '/<% x %>'", "is not an absolute path in"),
        ("paiConfig:", "localConfig: {reuse: true}\npaiConfig:", "cannot use localConfig: OpenPAI assigns"),
        ("paiStorageConfigName: c", "paiConfigPath: none.yml\n  paiStorageConfigName: c", "cannot read trial.paiConfigPath"),
        ("reuse: true", "reuse: false\nwarmImports: [numpy]", "turn on paiConfig.reuse as well, or remove it"),
    ],
)  # fmt: skip
def test_an_invalid_openpai_value_is_reported_in_one_sentence_with_a_remedy(diagnostics, old, new, sentence):
    (line,) = [line for line in diagnostics({old: new}) if sentence in line]
    assert "cannot" in line
    assert "s3cret" not in line
    assert "; " in line


def test_resource_numbers_in_the_trial_section_override_the_openpai_section(write):
    changed = {
        "  cpuNum: 1\n": "",
        "  memoryMB: 8196\n": "",
        "reuse: true": "cpuNum: 4\n  memoryMB: 512\n  gpuNum: 2",
    }
    pai = read_experiment_file(write(changed)).cluster
    assert (pai.cpu, pai.memory_mb, pai.gpu) == (4, 512, 0)


def test_a_job_file_replaces_the_resource_keys_and_is_stored_with_the_experiment(write, tmp_path):
    job = text_of(JOB)
    (tmp_path / "job.yml").write_text(job)
    text = PAGE[PAGE.index("  command:") : PAGE.index("  codeDir:")]
    needless = (
        "gpuNum: 0",
        "cpuNum: 1",
        "memoryMB: 8196",
        "image: msranni/nni:latest",
        "virtualCluster: default",
    )
    changed = {text: "  paiConfigPath: job.yml\n", **{f"  {line}\n": "" for line in needless}}
    config = read_experiment_file(write(changed))
    assert (config.cluster.job_file, config.cluster.job_text) == (tmp_path / "job.yml", job)
    assert config.trial_command == ""
    assert isinstance(config.cluster.job_file, Path)
    assert ExperimentSpec.from_json(config.to_json()) == config


def test_each_error_of_a_job_file_is_an_error_of_the_experiment_file(write, tmp_path):
    (tmp_path / "job.yml").write_text(text_of(a_job(((*WORKER, "instances"), 0), taskRole={})))
    with pytest.raises(ConfigInvalid) as refused:
        read_experiment_file(
            write({"  paiStorageConfigName": "  paiConfigPath: job.yml\n  paiStorageConfigName"})
        )
    told = [str(each).removeprefix(f"{tmp_path}/") for each in refused.value.diagnostics]
    assert [each.partition(": ")[0].partition(":")[0] for each in told] == ["job.yml"] * 2
    assert "cannot use taskRole" in told[1]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "it is not a regular file"),
        (
            lambda path: path.write_bytes(b"#" * (MAX_BYTES + 1)),
            f"it has {MAX_BYTES + 1} bytes, more than the limit",
        ),
    ],
)
def test_a_job_file_that_is_a_pipe_or_too_large_is_refused(diagnostics, tmp_path, make, why):
    make(tmp_path / "job.yml")
    (line,) = diagnostics({"  paiStorageConfigName": "  paiConfigPath: job.yml\n  paiStorageConfigName"})
    assert f"job.yml: {why}" in line
    assert line.endswith("name an OpenPAI job file")


def test_the_certificate_path_of_a_cluster_is_stored_as_an_absolute_path(write, tmp_path):
    certificate = tls_files.issue(tmp_path / "tls").certificate
    https = {"host: 10.1.1.1": "host: https://10.1.1.1\n  caFile: tls/certificate.pem"}
    config = read_experiment_file(write(https))
    assert (config.cluster.ca_file, config.warnings) == (certificate, ())
    assert ExperimentSpec.from_json(config.to_json()) == config
    http = {"host: 10.1.1.1": "host: 10.1.1.1\n  caFile: tls/certificate.pem"}
    (warning,) = read_experiment_file(write(http)).warnings
    assert warning.endswith(
        "paiConfig.caFile has no effect: the cluster is called with http; remove it, or write https:// before paiConfig.host"
    )


def test_a_ca_file_without_certificates_is_refused(diagnostics):
    (line,) = diagnostics({"host: 10.1.1.1": "host: https://10.1.1.1\n  caFile: search_space.json"})
    assert line.endswith(
        "cannot use paiConfig.caFile search_space.json: it is not a PEM file with certificates; name the CA's certificate "
        "in PEM format"
    )


def test_the_error_for_a_damaged_stored_experiment_contains_no_credentials(write):
    fields = json.loads(read_experiment_file(write()).to_json())
    fields["pai"]["token"] = ["a secret token"]
    with pytest.raises(InternalError) as caught:
        ExperimentSpec.from_json(json.dumps(fields))
    assert "pai.token" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
