"""nnictl experiment delete: the removed files, and the experiments that it refuses to delete."""

import contextlib
import json
import signal
import sqlite3

import pytest
from attempts import RegisteringStore
from deadlines import DEADLINE_S
from stored_experiments import a_process_of, finished

from nni_manager.client.remains import remains_of
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.jobs import Job
from nni_manager.store.registry import Registry
from nni_manager.store.rows import experiment_row, job_row
from nni_manager.training_services.retry_policy import ClientRetryPolicy

pytestmark = pytest.mark.usefixtures("state_home")


def test_an_ended_experiment_is_deleted_with_its_folder_and_registry_entry(nnictl, an_experiment, tmp_path):
    folder = an_experiment("abc11111")
    finished(folder, 0.5)
    code, _, err = nnictl("experiment", "delete", "abc")
    # Without --yes, nnictl refuses the deletion, because it has no terminal to ask for confirmation.
    assert (code, folder.path.exists()) == (1, True)
    assert "there is no terminal; confirm with --yes" in err
    assert nnictl("experiment", "delete", "abc", "--yes") == (0, "INFO: Deleted experiment abc11111\n", "")
    assert (folder.path.exists(), Registry.of_user().all()) == (False, [])


def test_a_failed_experiment_whose_trials_still_run_is_not_deleted_but_can_be_stopped(nnictl, an_experiment):
    """Running trials of an experiment that fails continue, and its manager may die before they end."""
    folder = an_experiment("abc11111")
    with contextlib.closing(RegisteringStore(folder.database, folder.collected_logs)) as store:
        rows = [
            job_row(Job("t0"), 1.0, None),
            experiment_row(ExperimentState.ERROR, "failed", 9.0, 10.0, True),
        ]
        store.commit(rows, 1.0)
    trial = a_process_of(folder)
    code, _, err = nnictl("experiment", "delete", "abc", "--yes")
    assert (code, folder.path.exists()) == (1, True)
    assert f"exited in state ERROR, and 1 process ({trial.pid}) of its trials run; run `nnictl stop" in err
    code, out, err = nnictl("stop", "abc")
    assert (code, err) == (0, "")
    assert f"Ended 1 process ({trial.pid}) without a manager" in out
    assert trial.wait(DEADLINE_S) == -signal.SIGKILL


def test_deleting_an_experiment_deletes_its_workspace_on_the_shared_storage(nnictl, an_experiment, tmp_path):
    folder = an_experiment("abc11111")
    finished(folder, 0.5)
    (tmp_path / "storage/abc11111/trials").mkdir(parents=True)
    (folder.path / "workspace").symlink_to(tmp_path / "storage/abc11111")
    assert nnictl("experiment", "delete", "abc", "--yes")[0] == 0
    assert list((tmp_path / "storage").iterdir()) == []


def test_a_running_experiment_is_not_deleted(nnictl, an_experiment):
    an_experiment("abc11111", port=9000)
    died = an_experiment("abd22222")
    done = an_experiment("abe33333")
    finished(done, 0.5)
    trial = a_process_of(died)
    code, _, err = nnictl("experiment", "delete", "abc", "--yes", "--force")
    assert (code, err) == (
        1,
        "ERROR: cannot delete experiment abc11111: it is running; run `nnictl stop abc11111` first\n",
    )
    code, _, err = nnictl("experiment", "delete", "abd", "--yes")
    assert code == 1
    assert err.startswith(
        "ERROR: cannot delete experiment abd22222: its manager exited in state INITIALIZED, "
        f"and 1 process ({trial.pid}) of its trials run; "
    )
    code, out, err = nnictl("experiment", "delete", "--all", "--yes")
    assert (code, out, err.count("WARNING: cannot delete")) == (0, "INFO: Deleted experiment abe33333\n", 2)
    assert nnictl("experiment", "delete", "abd", "--yes", "--force")[0] == 0
    assert not died.path.exists()
    trial.kill()
    trial.wait()


def test_an_experiment_with_a_dead_manager_can_be_deleted_after_its_trial_processes_have_ended(
    nnictl, an_experiment
):
    died = an_experiment("abd22222")
    trial, others = a_process_of(died), a_process_of(an_experiment("abd33333"))
    assert nnictl("experiment", "delete", "abd22222", "--yes")[0] == 1
    trial.kill()
    trial.wait()
    assert nnictl("experiment", "delete", "abd22222", "--yes") == (
        0,
        "INFO: Deleted experiment abd22222\n",
        "",
    )
    assert not died.path.exists()
    others.kill()
    others.wait()


def test_an_experiment_whose_jobs_may_still_exist_is_kept_while_its_cluster_is_unreachable(
    nnictl, an_experiment, tmp_path, monkeypatch
):
    monkeypatch.setattr(ClientRetryPolicy, "delay_s", lambda self, failures, asked_s: 0.0)
    died = an_experiment("abd22222")
    pai = {"host": "http://127.0.0.1:1", "user": "ada", "token": "t", "password": None, "mount": "/mnt"}
    pai |= {"storage": str(tmp_path), "image": "i", "storage_name": "s", "virtual_cluster": None}
    pai |= {"gpu": 0, "cpu": 1, "memory_mb": 100, "job_file": None, "job_text": None}
    with contextlib.closing(sqlite3.connect(died.database)) as connection:
        ((config,),) = connection.execute("SELECT config FROM experiment")
        changed = json.dumps(json.loads(config) | {"training_service": "pai", "pai": pai})
        connection.execute("UPDATE experiment SET config = ?", (changed,))
        connection.commit()
        # The store contains no job yet, so nnictl does not query the unreachable cluster.
        assert remains_of(died) == ""
        connection.execute("INSERT INTO job VALUES ('aB3dE', 1.0, NULL, 1)")
        connection.commit()
    code, _, err = nnictl("experiment", "delete", "abd", "--yes")
    assert code == 1
    assert (
        "exited in state INITIALIZED, and 1 job (aB3dE) may be left on its cluster; run `nnictl stop" in err
    )


@pytest.mark.parametrize("corrupt", ["database", "entry", "lock"])
def test_an_unreadable_experiment_can_be_deleted_with_the_force_option(nnictl, an_experiment, corrupt):
    folder = an_experiment("abc11111")
    if corrupt == "database":
        folder.database.write_bytes(b"corrupt" * 1000)
    elif corrupt == "entry":
        (Registry.of_user().folder / "abc11111.json").write_bytes(b"[]")
    else:
        (folder.path / "owner.lock").symlink_to(folder.path / "owner.lock")
    code, _, err = nnictl("experiment", "delete", "abc11111", "--yes")
    assert (code, err.startswith("ERROR: cannot ")) == (1, True)
    assert nnictl("experiment", "delete", "abc11111", "--yes", "--force")[0] == 0
    assert nnictl("experiment", "list", "--all")[1] == "INFO: There is no experiment\n"
