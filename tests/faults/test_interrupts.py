"""Ctrl-C, once and twice, at random moments of `nnictl create`. The command leaves no process, or names the running
experiment.
"""

import contextlib
import os
import random
import signal
import subprocess
import time

import psutil
import pytest
from amounts import amount
from deadlines import DEADLINE_S, scaled_s
from real_experiment import wait_until
from user_home import BIN, environ_of, left_in, processes_of

CONFIG = """\
authorName: ada
experimentName: tiny
trialConcurrency: 2
maxTrialNum: 3
trainingServicePlatform: local
searchSpacePath: search_space.json
logDir: ../experiments
tuner: {builtinTunerName: Random}
trial: {command: python3 train.py, codeDir: .}
"""
TRAIN = """\
import nni_sdk
lr = nni_sdk.get_next_parameter()["lr"]
nni_sdk.report_final_result(lr)
"""
ENDLESS = TRAIN.replace("nni_sdk.report_final", "import signal; signal.pause(); nni_sdk.report_final")
OURS = ("nni_manager", "trial_keeper", "nni_sdk")


@pytest.fixture
def place(tmp_path):
    """A user's home with an experiment file. After the test, all processes that the test started there are killed."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "config.yml").write_text(CONFIG)
    (folder / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    yield folder
    for process in processes_of(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def nnictl(place, *arguments):
    # The command has its own process group, like the foreground command of a shell. So os.killpg() interrupts it as Ctrl-C does.
    return subprocess.Popen(
        [BIN / "nnictl", *arguments],
        cwd=place,
        env=environ_of(place),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def interrupted(process, moments_s):
    """Interrupt the command at these moments, in seconds after its start, unless it ends before. Return its output."""
    began_s = time.monotonic()
    for moment_s in moments_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(began_s + moment_s - time.monotonic(), 0))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=2 * DEADLINE_S)
    return out + err


@pytest.mark.smoke
def test_an_early_interrupt_of_nnictl_create_leaves_no_process_and_no_experiment(place):
    (place / "train.py").write_text(ENDLESS)
    experiments = place.parent / "experiments"
    process = nnictl(place, "create", "config.yml")
    # The interrupt arrives after the experiment's folder was created and before the manager is ready. Between these two events
    # are a few hundred milliseconds.
    wait_until(lambda: any(experiments.glob("*/db")), "the experiment has a folder", every_s=0.001)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=2 * DEADLINE_S)
    said = "INFO: Interrupted: no experiment was created, and nothing of it runs"
    assert (process.returncode, out.splitlines()[-1:]) == (130, [said]), err
    assert "Traceback" not in err
    assert left_in(place) == []
    assert not [*experiments.glob("*")]


@pytest.mark.timeout(amount(300, 3600))
@pytest.mark.parametrize("foreground", [("--foreground",), ()], ids=["foreground", "background"])
def test_an_interrupted_nnictl_create_ends_all_processes_or_prints_the_stop_command(place, foreground):
    (place / "train.py").write_text(TRAIN)
    began_s = time.monotonic()
    whole = nnictl(place, "create", "config.yml", *foreground)
    out, err = whole.communicate(timeout=2 * DEADLINE_S)
    took_s = time.monotonic() - began_s
    assert whole.returncode == 0, out + err
    if not foreground:
        nnictl(place, "stop").communicate(timeout=2 * DEADLINE_S)

    unnamed, tracebacks = [], []
    for number in range(amount(3, 100)):
        chosen = random.Random(number)
        (place / "train.py").write_text(chosen.choice((TRAIN, ENDLESS)))
        first_s = chosen.uniform(0, took_s + scaled_s(0.2))
        moments_s = [
            first_s,
            *chosen.choice(([], [first_s + chosen.uniform(0.01, 0.05)], [first_s + chosen.uniform(0, 0.5)])),
        ]
        process = nnictl(place, "create", "config.yml", *foreground)
        printed = interrupted(process, moments_s)
        # A traceback without our modules is ignored. Python prints such a traceback if the interrupt arrives before the first
        # line of our code.
        if "Traceback" in printed and any(name in printed for name in OURS):
            tracebacks.append((number, moments_s, printed))
        names = {path.name for path in (place.parent / "experiments").glob("*")}
        for name in names:
            if f"nnictl stop {name}" in printed:
                nnictl(place, "stop", name).communicate(timeout=2 * DEADLINE_S)
        if left := left_in(place):
            unnamed.append((number, moments_s, left, printed))
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
    assert (unnamed, tracebacks) == ([], [])
