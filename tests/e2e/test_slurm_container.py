"""Experiments on a real Slurm whose jobs run in containers.

Apptainer cannot be installed here: podman runs the containers, behind a program with the part of Apptainer's command line that
jobs use. Source: apptainer-exec(1). A container has the node's environment, network and processes, the home, and the folders of
`--bind`.
"""

import json
import re
import secrets
import shlex

import pytest
from free_ports import free_port_pair
from real_experiment import wait_until
from slurm_here import a_slurm_here
from user_home import environ_of, left_in, run_nnictl

pytestmark = [pytest.mark.containers, pytest.mark.timeout(400)]
APPTAINER = """\
#!/bin/bash
[ "$1" = exec ] || exit 255
shift
volumes=("--volume=$HOME:$HOME")
while [[ $1 = --* ]]; do
  [[ $1 = --bind=* ]] || exit 255
  volumes+=("--volume=${1#--bind=}:${1#--bind=}")
  shift
done
image=${1#docker://}
shift
exec env {settings} podman run --label={label} --rm --pull=never --network=host --pid=host --env-host \\
  --env="PATH=/usr/bin:/bin" "${volumes[@]}" --workdir="$PWD" "$image" "$@"
"""
EXPERIMENT = """\
searchSpace: {lr: {_type: uniform, _value: [0, 1]}}
trialCommand: python3 train.py
trialCodeDirectory: .
maxTrialNumber: 3
trialConcurrency: 2
tuner: {name: Random}
trainingService:
  platform: slurm
  containerImage: docker://IMAGE
"""
# The file NODE_FILE exists only outside the container, so trials 0 and 1 report 1 if they run in a container. Trial 2 waits for
# SIGTERM.
TRAIN = """\
import pathlib, signal
import nni_sdk
nni_sdk.get_next_parameter()
if nni_sdk.get_sequence_id() < 2:
    nni_sdk.report_final_result(0 if pathlib.Path("NODE_FILE").exists() else 1)
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    nni_sdk.report_intermediate_result(1)
    signal.sigwait({signal.SIGTERM})
    nni_sdk.report_final_result(2)
"""


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "home" / "work"
    folder.mkdir(parents=True)
    return folder


def test_trials_of_a_job_with_an_image_run_in_containers_and_receive_the_stop_signal(podman, work, tmp_path):
    image = podman.base()
    names = ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF")
    label = f"test={secrets.token_hex(8)}"
    settings = " ".join(f"{name}={shlex.quote(podman.environ[name])}" for name in names)
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(APPTAINER.replace("{settings}", settings).replace("{label}", label))
    program.chmod(0o755)
    (work / "config.yml").write_text(EXPERIMENT.replace("IMAGE", image))
    (work / "train.py").write_text(TRAIN.replace("NODE_FILE", str(program)))
    with a_slurm_here() as slurm:
        path = f"{program.parent}:{environ_of(work)['PATH']}"
        environ = slurm.variables | {"PATH": path, "PYTHONPATH": str(podman.bundle())}

        def nnictl(*arguments):
            return run_nnictl(work, environ, *arguments)

        def trials():
            return json.loads(nnictl("trial", "ls", "--json").stdout)

        created = nnictl("create", "--config", "config.yml", "--port", str(free_port_pair()))
        assert created.returncode == 0, created.stdout + created.stderr
        (experiment_id,) = re.findall(r"The experiment id is (\w+)", created.stdout)
        wait_until(
            lambda: [each["intermediateCount"] for each in trials()][2:] == [1], "the third trial trains"
        )
        stopped = nnictl("trial", "kill", "--trial-id", trials()[2]["id"])
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        expected = [("SUCCEEDED", 1), ("SUCCEEDED", 1), ("USER_CANCELED", 2)]
        wait_until(
            lambda: [(each["status"], each["value"]) for each in trials()] == expected,
            "all trials have ended",
        )
        assert nnictl("stop", experiment_id).returncode == 0
        wait_until(lambda: slurm.live() == [], "no job is left")
    assert podman.run("podman", "ps", "--all", "--quiet", f"--filter=label={label}") == ""
    assert left_in(work) == []
