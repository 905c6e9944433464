"""A new user's first session with nnictl, at a real terminal."""

import contextlib
import csv
import os
import re
import sys
from pathlib import Path

import psutil
import pytest
from terminal import Terminal

pytestmark = pytest.mark.smoke

CTRL_C = b"\x03"
BIN = Path(sys.executable).parent
CONFIG = """\
authorName: ada
experimentName: first
trialConcurrency: 2
maxTrialNum: 12
trainingServicePlatform: local
searchSpacePath: search_space.json
logDir: ../experiments
tuner: {builtinTunerName: Random, classArgs: {optimize_mode: maximize, seed: 1}}
trial: {command: python3 train.py, codeDir: .}
"""
# These trials wait until the test opens their gate. The other trials end immediately.
GATED = (0, 1, 5, 8, 9)
TRAIN = """\
import nni_sdk
lr = nni_sdk.get_next_parameter()["lr"]
number = nni_sdk.get_sequence_id()
print(f"trial number {number} begins", flush=True)
nni_sdk.report_intermediate_result(lr / 2)
if number in GATED:
    open(f"gate-{number}").read()
    print(f"trial number {number} goes on", flush=True)
nni_sdk.report_final_result(lr)
"""


@pytest.fixture
def place(tmp_path):
    """A user's home. Processes that a test starts there are killed after the test."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "config.yml").write_text(CONFIG)
    (folder / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (folder / "train.py").write_text(TRAIN.replace("GATED", str(GATED)))
    for number in GATED:
        os.mkfifo(folder / f"gate-{number}")
    yield folder
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(tmp_path):
                process.kill()


@pytest.fixture
def terminal(place):
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("NNI_", "TRIAL_KEEPER_"))
    }
    environ |= {
        "HOME": str(place.parent),
        "XDG_STATE_HOME": str(place.parent / "state"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    shell = Terminal(place, environ)
    yield shell
    shell.close()


def rows_of(said):
    """The rows of `trial ls` by sequence id: id, state, value."""
    return {
        int(row[1]): row.groups()[1:]
        for row in re.finditer(r"^ *(\d+) +(\S{5}) +([A-Z_]+) +([\d.]*)", said, re.MULTILINE)
    }


# The session runs about a dozen commands, each with a timeout for a busy machine. So this test has a longer timeout than others.
@pytest.mark.timeout(600)
def test_a_user_can_create_watch_stop_and_resume_an_experiment_in_a_terminal(place, terminal):
    code, said = terminal.run("nnictl create config.yml")
    assert code == 0
    experiment = re.search(r"The experiment id is (\w{8})", said)[1]
    port = int(re.search(r"The API url is: http://127\.0\.0\.1:(\d+)/", said)[1])
    assert (f"Port 8080 is taken; this experiment uses port {port}" in said) == (port != 8080)
    begin = said.index("The experiment id is")
    assert max(map(len, said[begin:].splitlines())) <= 80
    assert re.search(rf"^  nnictl trial ls {experiment} +list the trials", said, re.MULTILINE)

    terminal.type("nnictl top")
    terminal.wait_for("2 running")
    assert terminal.press(CTRL_C)[0] == 130  # Ctrl-C ends the display and not the experiment

    code, said = terminal.run("nnictl trial ls")
    assert code == 0
    rows = rows_of(said)
    (first, state, _), (second, _, _) = rows[0], rows[1]
    assert (len(rows), state) == (2, "RUNNING")

    terminal.type(f"nnictl log trial --trial-id {second} --follow")
    terminal.wait_for("trial number 1 begins")
    assert terminal.press(CTRL_C)[0] == 130

    code, said = terminal.run("nnictl update concurrency --value 3")
    assert (code, said.startswith("INFO: ")) == (0, True)
    # The new third slot runs trials 2 to 4, which succeed, and then trial 5, which waits for its gate.
    terminal.type("nnictl top")
    terminal.wait_for("3 running.*3 succeeded")
    assert terminal.press(CTRL_C)[0] == 130

    code, said = terminal.run(f"nnictl trial kill --trial-id {first}")
    assert (code, f"INFO: Stopping trial {first}; " in said) == (0, True)
    terminal.type("nnictl top")
    terminal.wait_for("3 running.*5 succeeded.*1 stopped by user")
    assert terminal.press(CTRL_C)[0] == 130

    terminal.type(f"nnictl log trial --trial-id {second[:4]} --tail 1 --follow")
    terminal.wait_for("trial number 1 begins")
    with (place / "gate-1").open("w"):
        pass
    terminal.wait_for("trial number 1 goes on")
    terminal.wait_for(r"\[0\]ready> $")  # the command exits when its trial ends

    terminal.type("nnictl top")
    terminal.wait_for("3 running.*6 succeeded")
    assert terminal.press(CTRL_C)[0] == 130
    code, said = terminal.run("nnictl stop")
    assert (code, "INFO: Stop experiment success." in said) == (0, True)
    code, said = terminal.run("nnictl stop")
    assert (code, f"ERROR: cannot stop experiment {experiment}: it is STOPPED already; " in said) == (1, True)

    code, said = terminal.run("nnictl resume")
    assert (code, f"The experiment id is {experiment}" in said) == (0, True)
    code, said = terminal.run("nnictl top")
    assert (code, "DONE" in said, "12/12" in said) == (0, True, True)

    code, said = terminal.run("nnictl experiment export --type csv --filename results.csv")
    results = list(csv.DictReader((place / "results.csv").read_text().splitlines()))
    assert (code, f"INFO: Wrote the results of {len(results)} trials to results.csv" in said) == (0, True)
    rows = rows_of(terminal.run("nnictl trial ls")[1])
    assert rows[0][1] == "USER_CANCELED"
    succeeded = {number: trial_id for number, (trial_id, state, _) in rows.items() if state == "SUCCEEDED"}
    assert list(succeeded) == [1, 2, 3, 4, 6, 7, 10, 11]
    assert [row["trialJobId"] for row in results] == list(succeeded.values())
    assert all(row["value"] == row["lr"] for row in results)
    assert terminal.run("nnictl stop")[0] == 0
