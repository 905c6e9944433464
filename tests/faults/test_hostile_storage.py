"""Another user of a cluster's shared storage can neither forge a trial's result nor delay the trial.

The user has the group of the keepers' files, and attacks with special files. The containers have several umasks.
"""

import asyncio
import itertools
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from amounts import amount
from deadlines import scaled_s
from jobs_here import JobsHere
from real_experiment import a_manager_here, until, values
from second_user import an_attacker

from nni_manager.domain import transports as transports_module
from nni_manager.training_services.base import Placement
from nni_manager.training_services.local.platform import LocalPlatform

TRIALS = amount(2, 20)
MAX_DELAY_S = 5.0
UNREACHABLE = "127.0.0.1:9"

pytestmark = [
    pytest.mark.timeout(120 + TRIALS * 10),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to attack as another user"),
]

TRAIN = """
import os, time
import nni_sdk as nni
gates = {gates!r} + "/" + os.environ["NNI_TRIAL_JOB_ID"]
open(gates + ".started", "w").close()
nni.get_next_parameter()
while not (os.path.exists(gates + ".go") and os.path.exists({imported!r})):
    time.sleep(0.01)
number = int(os.environ["NNI_TRIAL_SEQ_ID"])
for i in range(20):
    nni.report_intermediate_result(i)
nni.report_final_result(number)
open(gates + ".reported", "w").close()
"""
REUSE = {"localConfig": {"reuse": True}, "trialConcurrency": 1}
KINDS = {
    # In the kind `plain-storage`, keepers cannot reach the manager, which reads their results from the storage. Reused jobs need
    # a connection, so the last two kinds have one.
    "plain-storage": ({"trialConcurrency": 4}, UNREACHABLE),
    "plain-stream": ({"trialConcurrency": 4}, None),
    "reuse": (REUSE, None),
    "warm": (REUSE | {"warmImports": ["nni_sdk", "imported_last"]}, None),
}
IN_SHORT = {("plain-stream", 0o002), ("reuse", 0o027)}


class JobsOnACluster(JobsHere):
    """Jobs like those of a cluster: each container sets a umask, and can access only the workspace. Other users may write to the
    workspace.
    """

    uses_snapshot = True
    runs_as_manager = False

    def __init__(self, umask: int, gates: Path, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        # A keeper reads the earlier attempts of its trial when it starts. So the script of the job starts the keeper only after
        # the attack on this trial has started.
        wait = f'[ -z "$TRIAL_KEEPER_TRIAL_ID" ] || until [ -e "{gates}/$TRIAL_KEEPER_TRIAL_ID.start" ]; do sleep 0.01; done'
        self.run_script = self.run_script.replace("exec ", f"umask {umask:03o}\n{wait}\nexec ")

    def placement(self, job_id: str) -> Placement:
        return Placement(None, super().placement(job_id).gpu_indices)


@pytest.fixture(autouse=True)
def early_polls(monkeypatch):
    monkeypatch.setattr(transports_module, "RECONNECT_GRACE_S", 0.5)
    monkeypatch.setattr(transports_module, "POLL_INTERVAL_S", 0.2)


@pytest.fixture(autouse=True)
def ended_keepers():
    yield
    JobsHere.end_keepers()


@pytest.mark.parametrize(
    ("kind", "umask"),
    # Each kind of job creates its files in a different way, so every kind runs with umask 000. IN_SHORT adds two combinations
    # with another umask. The thorough form runs all combinations.
    [
        pytest.param(kind, umask, id=f"{kind}-{umask:03o}")
        for kind, umask in itertools.product(KINDS, (0o022, 0o002, 0o027, 0o000))
        if amount(umask == 0 or (kind, umask) in IN_SHORT, True)
    ],
)
def test_another_user_of_the_shared_storage_changes_no_result_and_delays_no_trial(
    a_real_experiment, tmp_path, open_way, monkeypatch, kind, umask
):
    config, told = KINDS[kind]
    # With warmImports, some trials are not forks: the first trial, and trials that start before the imports finish. So the kind
    # `warm` runs at least four trials, and one of them must be a fork.
    trial_count = max(TRIALS, 4) if kind == "warm" else TRIALS
    storage, gates, modules = tmp_path / "storage", tmp_path / "gates", tmp_path / "modules"
    for folder in (storage, gates, modules):
        folder.mkdir()
    gates.chmod(0o777)
    imported = tmp_path / "imported"
    (modules / "imported_last.py").write_text(f"open({str(imported)!r}, 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
    if kind != "warm":
        imported.touch()
    monkeypatch.setattr(LocalPlatform, "storage_here", lambda _: storage)
    experiment = a_real_experiment(
        TRAIN.format(gates=str(gates), imported=str(imported)),
        maxTrialNum=trial_count,
        trial={"command": f"{sys.executable} train.py", "codeDir": "."},
        **config,
    )
    (experiment.code / "package").mkdir()
    (experiment.code / "package" / "__init__.py").touch()
    workspace = experiment.folder.workspace
    jobs = partial(JobsOnACluster, umask, gates, experiment.config, workspace, experiment.folder.jobs)

    async def play():
        with an_attacker(workspace.root, gates) as printed:
            async with a_manager_here(experiment, jobs, told) as engine:
                await until(
                    lambda: printed() is not None and engine.finished.is_set(),
                    "the experiment is over",
                    scaled_s(60 + trial_count * 10),
                )
                await engine.until_stopped()
                return list(engine.experiment.trials.values()), printed()

    trials, printed = asyncio.run(play())
    assert [line for line in printed if line.startswith("changed")] == []
    assert sorted(printed) == sorted(f"attacked {trial.trial_id}" for trial in trials)
    assert [(trial.state.value, trial.run.value) for trial in trials] == [
        ("SUCCEEDED", float(trial.sequence_id)) for trial in trials
    ]
    for trial in trials:
        assert values(experiment.rows(trial.trial_id)) == [*range(20), trial.sequence_id]
        if kind.startswith("plain"):
            # The manager examines the files beside the attempts only when a job ends. A reused job has started other trials by
            # then, so a trial that it ran earlier may have no warning.
            assert "check who may write to the shared storage" in trial.warning
    delays_s = [seconds for trial in trials for seconds in delays(gates, trial.trial_id, kind)]
    print(
        f"{kind}, umask {umask:03o}: {trial_count} trials, 0 results forged, the longest delay {max(delays_s):.1f} s"
    )
    assert max(delays_s) < scaled_s(MAX_DELAY_S)
    if kind == "warm":
        assert any("fork of a warm interpreter" in log for log in keeper_logs(workspace))


def delays(gates: Path, trial_id: str, kind: str) -> list[float]:
    """Two delays in seconds: from the first attack to the start of the command, and from the second attack to the final
    report.
    """
    started, go, reported = (at_s(gates, trial_id, gate) for gate in ("started", "go", "reported"))
    starts = [started - at_s(gates, trial_id, "start")] if kind.startswith("plain") else []
    return [*starts, reported - go]


def at_s(gates: Path, trial_id: str, gate: str) -> float:
    return (gates / f"{trial_id}.{gate}").stat().st_mtime


def keeper_logs(workspace) -> list[str]:
    return [path.read_text() for path in workspace.trials.glob("*/attempts/*/*/output/trial.log")]
