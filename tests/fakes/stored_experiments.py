"""Stored experiments without a manager, as nnictl finds them."""

import contextlib
import json
import os
import subprocess
from pathlib import Path

from attempts import RegisteringStore, attempt_id

from nni_manager.config.reader import read_experiment_file
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.ingest import AttemptIngest
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from nni_manager.store.folders import ExperimentFolder, ManagerProcess
from nni_manager.store.registry import Registry
from nni_manager.store.rows import experiment_row, trial_row
from nni_manager.store.writer import Store
from trial_keeper import __version__
from trial_keeper.wire.messages import AttemptKey, Stream

CONFIG = """\
authorName: ada
experimentName: digits
trialConcurrency: 2
trainingServicePlatform: local
searchSpacePath: search_space.json
useAnnotation: false
tuner: {builtinTunerName: TPE, classArgs: {optimize_mode: maximize}}
trial: {command: "true", codeDir: .}
"""


@contextlib.contextmanager
def experiments_in(home):
    """A function that makes a stored experiment below this folder. If it gets a port, the experiment appears to have a running
    manager until the end of the block.
    """
    (home / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (home / "config.yml").write_text(CONFIG)
    config = read_experiment_file(home / "config.yml").to_json()
    with contextlib.ExitStack() as stack:

        def make(experiment_id, port=None):
            folder = ExperimentFolder(home / "logs" / experiment_id)
            folder.make()
            Store.create(folder.database, folder.collected_logs, experiment_id, config, b"s", 0.0).close()
            Registry.of_user().add(folder)
            if port is not None:
                stack.enter_context(folder.owned())
                folder.write_process(ManagerProcess(os.getpid(), "127.0.0.1", port, __version__))
            return folder

        yield make


def finished(folder, *results):
    """Adds a trial for each result, and ends the experiment."""
    store = RegisteringStore(folder.database, folder.collected_logs)
    for number, result in enumerate(results):
        trial = Trial(
            f"t{number}",
            number,
            {"lr": number / 10},
            {},
            1.0,
            f"t{number}",
            TrialState.SUCCEEDED,
            run=TrialRun(attempt=0),
        )
        trial.run.final, trial.run.value, trial.run.reporter = str(result), result, "main"
        record = json.dumps({"parameter_id": number, "trial_job_id": trial.trial_id, "type": "PERIODICAL",
                             "sequence": 0, "value": "0.1"}).encode() + b"\n"  # fmt: skip
        receiver = AttemptIngest(AttemptKey(trial.trial_id, attempt_id(0), "main"))
        frame = b"ME%06d" % len(record) + record
        store.commit([trial_row(trial), *receiver.take(Stream.METRICS, 0, frame)], 1.0)
    store.commit([experiment_row(ExperimentState.DONE, "", 9.0, 10.0, True)], 1.0)
    store.close()


def a_process_of(folder):
    """Start a process that the manager regards as a trial process of this experiment."""
    attempt = folder.workspace.root / "trials/aB3dE/attempts/0/main-0"
    process = subprocess.Popen(
        ["sleep", "600"], env={"NNI_SYS_DIR": str(attempt), "PATH": os.environ["PATH"]}
    )
    # Popen returns when exec closes a pipe. The kernel sets the new environment only after that, so the loop waits until it is
    # visible.
    while not Path(f"/proc/{process.pid}/environ").read_bytes():
        pass
    return process
