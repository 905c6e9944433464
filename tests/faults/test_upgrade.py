"""This manager resumes experiments of earlier releases whose manager was killed.

No row is lost or duplicated. Each archive has three trials of 12 intermediate results and a final result. One trial has ended. Of
the other two, one has 5 rows in the database and one has none; the remaining records are in their attempt folders. In
experiment-0.6.tar.gz, the attempts of these two trials are unsigned and named attempts/0. One of the two also has a forged
attempts/7. The experiment in experiment-0.7-format-6.tar.gz and the keeper in keeper-0.7-before-renames.tar.xz come from one
commit. It is the last commit before columns and documents were renamed.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from attempts import metrics_of
from real_experiment import RealExperiment, a_manager_here, until, values
from saved_archives import unpack

from nni_manager.config.model import ExperimentSpec
from nni_manager.domain.trial import Trial
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.store.writer import Store
from nni_manager.training_services.local import client
from nni_manager.training_services.local.client import LocalTrainingService

pytestmark = pytest.mark.smoke

HERE = Path(__file__).parent
TRAIN = """
import nni_sdk
nni_sdk.get_next_parameter()
for value in range(12):
    nni_sdk.report_intermediate_result(value)
nni_sdk.report_final_result(nni_sdk.get_sequence_id())
"""


def resumed(tmp_path: Path, archive: str) -> tuple[ExperimentFolder, list[Trial]]:
    """Resume the experiment of an archive and run it until it ends."""
    unpack(HERE / archive, tmp_path)
    folder = ExperimentFolder(tmp_path / "experiments" / "TESTEXPT")
    with StoreReader(folder.database) as reader:
        config = ExperimentSpec.from_json(reader.experiment().config)
        assert sorted(len(metrics_of(reader, trial.trial_id)) for trial in reader.trials()) == [0, 5, 13]
    config = config.replace(code_dir=tmp_path / "code", log_dir=folder.path.parent)
    Store(folder.database, folder.collected_logs).close()
    here = SimpleNamespace(config=config, folder=folder)

    async def resume() -> list[Trial]:
        jobs = partial(LocalTrainingService, config, folder.workspace, folder.jobs)
        async with a_manager_here(here, jobs) as engine:
            await until(engine.finished.is_set, "the experiment is over")
            return list(engine.experiment.trials.values())

    return folder, asyncio.run(resume())


def check_rows(folder: ExperimentFolder, trial: Trial) -> None:
    """Check that the trial succeeded, and that each of its rows is stored once."""
    assert (trial.state.value, trial.run.value) == ("SUCCEEDED", float(trial.sequence_id)), trial.run.message
    with StoreReader(folder.database) as reader:
        assert values(metrics_of(reader, trial.trial_id)) == [*range(12), trial.sequence_id]


def test_a_resume_reads_the_unstored_records_of_a_version_0_6_experiment_once(tmp_path: Path) -> None:
    folder, trials = resumed(tmp_path, "experiment-0.6.tar.gz")
    for trial in trials:
        check_rows(folder, trial)
        with StoreReader(folder.database) as reader:
            (attempt,) = (each for each in reader.attempts(trial.trial_id) if each.key.task)
        assert (attempt.number, attempt.key.attempt_id, attempt.key.task) == (0, "0", "main-0")
        has_forged = (folder.workspace.trial(trial.trial_id).attempts / "7").exists()
        assert ("attempts/7/main-0: it is not a registered attempt" in trial.warning) == has_forged


def test_a_resume_reads_the_unstored_records_of_a_format_6_experiment_once(tmp_path: Path) -> None:
    folder, trials = resumed(tmp_path, "experiment-0.7-format-6.tar.gz")
    assert len(trials) == 3
    for trial in trials:
        check_rows(folder, trial)
        assert trial.warning == ""


@pytest.mark.parametrize("reuse", [False, True], ids=["one job each", "reuse"])
def test_keepers_of_an_older_release_work_with_this_manager(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    a_real_experiment: Callable[..., RealExperiment],
    reuse: bool,
) -> None:
    """With `reuse`, the manager prefetches trials. The two cases together use every message of the protocol except refusals."""
    unpack(HERE / "keeper-0.7-before-renames.tar.xz", tmp_path)
    python, started = tmp_path / "python", tmp_path / "started"
    python.write_text(
        "#!/bin/sh\n"
        f"export PYTHONPATH={tmp_path}/keeper\n"
        f"{sys.executable} -c 'import trial_keeper.host.relay' && echo $$ >> {started}\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(client, "sys", SimpleNamespace(executable=os.fspath(python)))
    # The fork server of this manager would start keepers of the current version, so the manager does not use it.
    monkeypatch.setattr(LocalTrainingService, "forks_keepers", False)
    trials_wanted = 8 if reuse else 3
    experiment = a_real_experiment(
        TRAIN, trialConcurrency=2, maxTrialNum=trials_wanted, localConfig={"reuse": reuse}
    )

    async def run() -> list[Trial]:
        jobs = partial(
            LocalTrainingService, experiment.config, experiment.folder.workspace, experiment.folder.jobs
        )
        async with a_manager_here(experiment, jobs) as engine:
            await until(engine.finished.is_set, "the experiment is over")
            return list(engine.experiment.trials.values())

    trials = asyncio.run(run())
    assert len(trials) == trials_wanted
    for trial in trials:
        check_rows(experiment.folder, trial)
    assert len(started.read_text().split()) == (2 if reuse else 3), "every keeper must be the old one"
