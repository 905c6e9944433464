"""A trial replaces its own files by links and pipes. The manager reads the files without a keeper."""

import json

import pytest
from attempts import AttemptNumbers, attempt_id

from nni_manager.store.writer import log_path
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.reasons import ExitReason

SECRET = "nobody-but-the-owner-may-see-this"
# The trial kills its own keeper, so that the manager reads the trial's files without a keeper.
TRAIN = """
import json, os, signal, sys
import nni_sdk as nni
nni.get_next_parameter()
folder = os.environ["NNI_SYS_DIR"]
nni.report_intermediate_result(1)
{trap}
keeper = int(open(f"/proc/{{os.getppid()}}/stat").read().rpartition(")")[2].split()[1])
for pid in (os.getppid(), keeper):
    if b"trial_keeper" in open(f"/proc/{{pid}}/cmdline", "rb").read():
        os.kill(pid, signal.SIGKILL)
"""
TRAPS = {
    "links": """
for name in ("output/stdout", ".nni/metrics", "exit.json"):
    if os.path.lexists(f"{folder}/{name}"):
        os.unlink(f"{folder}/{name}")
    os.symlink(os.environ["SECRET_FILE"], f"{folder}/{name}")
""",
    "a folder that is a link": """
os.rename(f"{folder}/output", f"{folder}/was")
os.symlink(os.path.dirname(os.environ["SECRET_FILE"]), f"{folder}/output")
""",
    "pipes": """
for name in ("output/stdout", "output/stderr", ".nni/metrics", "exit.json"):
    if os.path.lexists(f"{folder}/{name}"):
        os.unlink(f"{folder}/{name}")
    os.mkfifo(f"{folder}/{name}")
""",
    "the end of another trial": """
end = {"trial_id": "other", "attempt": 0, "task": "main-0", "reason": "succeeded", "exit_code": 0,
       "started_at_s": 1.0, "ended_at_s": 2.0, "final_sizes": {"metrics": 0}, "message": ""}
open(f"{folder}/exit.json", "w").write(json.dumps(end))
""",
}


@pytest.mark.parametrize("trap", TRAPS)
def test_the_manager_does_not_follow_links_or_pipes_among_the_files_of_a_trial(
    a_real_experiment, tmp_path, trap
):
    secret = tmp_path / "private" / "stdout"
    secret.parent.mkdir()
    secret.write_text(SECRET)
    experiment = a_real_experiment(
        TRAIN.format(trap=TRAPS[trap]),
        environ={"SECRET_FILE": str(secret)},
        trialConcurrency=1,
        maxTrialNum=1,
        logCollection="http",
    )
    experiment.start()
    summary = experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert (trial["state"], trial["reason"]) == ("FAILED", ExitReason.KEEPER_LOST.value), trial
    assert summary["errors"] == []
    key = AttemptNumbers(experiment.folder.workspace).real(
        AttemptKey(trial["id"], attempt_id(trial["attempt"] or 0), "main-0")
    )
    for stream in Stream:
        collected = log_path(experiment.folder.collected_logs, key, stream)
        assert not collected.exists() or SECRET not in collected.read_text(), stream
    assert SECRET not in json.dumps([experiment.get("/metric-data"), trial])
    assert experiment.manager.poll() is None
