"""Whole experiments on the fake OpenPAI: a home with an experiment file, and nnictl."""

import os
import re
import subprocess
import sys
from pathlib import Path

from deadlines import scaled_s
from fake_pai import USER

from trial_keeper.wire.workspace import Workspace

BIN = Path(sys.executable).parent


def make_place(tmp_path, server, train):
    """The folder of an experiment for the server; the storage is a folder with the same path in jobs."""
    folder = tmp_path / "work"
    folder.mkdir()
    storage = tmp_path / "storage"
    storage.mkdir(mode=0o755)
    (folder / "train.py").write_text(train)
    (folder / "helper.py").write_text("")
    (folder / "big.bin").write_bytes(bytes(1000))
    (folder / ".nniignore").write_text("*.bin\n")
    (folder / "search_space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
    (folder / "config.yml").write_text(
        f"""\
authorName: ada
experimentName: on openpai
trialConcurrency: 2
maxTrialNum: 3
trainingServicePlatform: pai
searchSpacePath: search_space.json
logDir: ../experiments
useAnnotation: false
tuner: {{builtinTunerName: Random, classArgs: {{optimize_mode: maximize}}}}
trial:
  command: python3 train.py
  codeDir: .
  gpuNum: 0
  cpuNum: 1
  memoryMB: 512
  image: anything
  nniManagerNFSMountPath: {storage}
  containerNFSMountPath: {storage}
  paiStorageConfigName: confignfs-data
paiConfig:
  userName: {USER}
  token: token-of-the-profile-page
  host: {server.host}
"""
    )
    return folder


def run_nnictl(place, *arguments, replace=()):
    """Run nnictl and wait until it exits. The umask of nnictl denies access for other users."""
    config = place / "config.yml"
    for old, new in dict(replace).items():
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, new))
    outside = {name: value for name, value in os.environ.items() if not name.startswith("NNI_")}
    return subprocess.run(
        ["bash", "-c", 'umask 077; exec "$@"', "bash", str(BIN / "nnictl"), *arguments],
        cwd=place,
        env=outside | {"HOME": str(place.parent), "XDG_STATE_HOME": str(place.parent / "state")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled_s(120),
        check=False,
    )


def workspace_of(place, done):
    """The workspace of the experiment that `nnictl create` has created."""
    (experiment_id,) = re.findall(r"The experiment id is (\w+)", done.stdout)
    return Workspace(place.parent / "storage" / experiment_id)
