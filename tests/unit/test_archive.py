"""nnictl experiment save and load: saves an experiment to one file, and loads archives, also from untrusted sources."""

import io
import json
import pickle
import shutil
import sqlite3
import tarfile
from functools import partial
from pathlib import Path

import pytest
from saved_archives import SECRET, a_member, move_to, repacked, save_an_experiment

from nni_manager.cli import archive, main
from nni_manager.config.model import ExperimentSpec, TunerConfig
from nni_manager.config.search_space import parse_search_space
from nni_manager.domain.experiment import ExperimentState
from nni_manager.engine.tokens import api_token_of
from nni_manager.errors import UserError
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry
from nni_manager.training_services.platform import Locations
from nni_manager.tuner.base import PastTrial
from nni_manager.tuner.registry import make_tuner
from nni_manager.tuner.untrusted_metadata import strip_pickles

pytestmark = pytest.mark.slow


@pytest.fixture
def move(monkeypatch, tmp_path):
    """Return a function that moves the test to another simulated machine, which is an empty home directory."""

    def to(name):
        return move_to(monkeypatch, tmp_path / name)

    return to


@pytest.fixture
def here(move):
    return move("here")


@pytest.fixture
def saved(here):
    """Return a function that creates and saves an experiment of one trial, and returns the archive."""
    return partial(save_an_experiment, here)


def names_in(path):
    with tarfile.open(path) as packed:
        return packed.getnames()


def test_an_experiment_loaded_on_another_machine_equals_the_saved_experiment(saved, move, capsys):
    path = saved("--saveCodeDir")
    err = capsys.readouterr().err
    assert err == f"WARNING: {path} does not contain 2 links, pipes or unreadable files of trials\n"
    assert path.stat().st_mode & 0o777 == 0o600
    there = move("there")
    assert main.run(["experiment", "load", "-p", str(path), "-s", str(there / "space.json")]) == 0
    out = capsys.readouterr().out
    folder = ExperimentFolder(there / "nni-experiments/abc11111")
    assert out.startswith(f"INFO: Loaded experiment abc11111 (DONE) into {folder.path}\n")
    assert f"runs `python3 train.py` in {folder.path}/saved-code\n" in out
    assert (folder.path / "saved-code/train.py").read_text() == "print(1)\n"
    assert json.loads((there / "space.json").read_text()) == {"lr": {"_type": "uniform", "_value": [0, 1]}}
    assert folder.manager_log.read_text() == "decided\n"
    assert (folder.workspace.root / "checkpoints/0/model").read_text() == "weights"
    assert main.run(["log", "trial", "abc", "-T", "aB3dE"]) == 0
    assert main.run(["experiment", "export", "abc"]) == 0
    assert capsys.readouterr().out == (
        'hello\n[\n{"trialJobId": "aB3dE", "parameter": {"lr": 0.5}, "value": 0.25, "tags": ["keep"]}\n]\n'
    )
    with StoreReader(folder.database) as reader:
        stored, (trial,) = reader.experiment(), reader.trials()
    config = ExperimentSpec.from_json(stored.config)
    assert (config.log_dir, config.config_path) == (there / "nni-experiments", config.code_dir / "config.yml")
    assert (stored.state, stored.active_s, dict(trial.metadata)) == (ExperimentState.DONE, 9.0, {"/lr": 0.5})
    assert (stored.remarks.note, trial.remarks.tags) == ("ours", ("keep",))
    # The loaded experiment has a new secret. So neither a token of the first machine nor a token made from the archive is valid.
    assert api_token_of(stored.secret) not in (api_token_of(SECRET), api_token_of(b""))
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_an_archive_contains_no_secret_no_code_copy_and_no_signed_checkpoints(saved):
    path = saved()
    assert [name for name in names_in(path) if "code" in name or "tls" in name or "000001" in name] == []
    with tarfile.open(path) as packed:
        database = packed.extractfile("experiment.sqlite").read()
    assert SECRET not in database


def test_an_archive_contains_no_login_and_loading_requires_a_new_login(saved, move, capsys, monkeypatch):
    pai = {"host": "http://pai.example", "user": "ada", "token": "a-token", "password": None, "mount": "/mnt"}
    pai |= {"storage": "/none", "image": "i", "storage_name": "s", "virtual_cluster": None}
    pai |= {"gpu": 0, "cpu": 1, "memory_mb": 100, "job_file": None, "job_text": None}
    path = saved("-s", training_service="pai", pai=pai)
    with tarfile.open(path) as packed:
        assert b"a-token" not in packed.extractfile("experiment.sqlite").read()
    there = move("there")
    load = ["experiment", "load", "-p", str(path)]
    assert main.run(load) == 1
    assert "there is no folder /none; set --storage to " in capsys.readouterr().err
    (there / "storage").mkdir()
    load += ["--storage", str(there / "storage")]
    assert main.run(load) == 1
    assert "archives contain no login; set OPENPAI_TOKEN or OPENPAI_PASSWORD " in capsys.readouterr().err
    monkeypatch.setenv("OPENPAI_TOKEN", "another")
    assert main.run(load) == 0
    assert capsys.readouterr().out.endswith(", on OpenPAI http://pai.example\n")
    folder = ExperimentFolder(there / "nni-experiments/abc11111")
    with StoreReader(folder.database) as reader:
        loaded = ExperimentSpec.from_json(reader.experiment().config).cluster
    assert (loaded.token, loaded.storage) == ("another", there / "storage")
    stdout = there / "storage/abc11111/trials/aB3dE/attempts/0/main-0/output/stdout"
    assert (stdout.read_text(), stdout.stat().st_mode & 0o777) == ("hello\n", 0o644)


def test_an_archive_contains_no_password_of_machines(saved):
    machine = {"host": "a.example", "user": "ada", "password": "a-password", "ssh_passphrase": "a-passphrase"}
    with tarfile.open(saved(training_service="remote", remote={"machines": [machine]})) as packed:
        database = packed.extractfile("experiment.sqlite").read()
    assert b"a.example" in database
    assert b"a-password" not in database
    assert b"a-passphrase" not in database


def test_a_kubernetes_experiment_is_loaded_into_the_shared_storage(saved, move, capsys):
    storage = ["ClaimStorage", {"path": "/none", "name": "nni"}]
    kubernetes = {"operator": "frameworkcontroller", "storage": storage, "roles": [], "template": None}
    path = saved(training_service="frameworkcontroller", kubernetes=kubernetes)
    there = move("there")
    load = ["experiment", "load", "-p", str(path)]
    assert main.run(load) == 1
    assert "there is no folder /none; set --storage to " in capsys.readouterr().err
    (there / "storage").mkdir()
    assert main.run([*load, "--storage", str(there / "storage")]) == 0
    folder = ExperimentFolder(there / "nni-experiments/abc11111")
    assert folder.workspace.root == there / "storage/abc11111"
    stdout = there / "storage/abc11111/trials/aB3dE/attempts/0/main-0/output/stdout"
    assert (stdout.read_text(), stdout.stat().st_mode & 0o777) == ("hello\n", 0o644)
    with StoreReader(folder.database) as reader:
        loaded = ExperimentSpec.from_json(reader.experiment().config).cluster
    assert loaded.storage.path == there / "storage"


def test_an_experiment_on_nfs_is_not_loaded_if_the_export_is_not_mounted(saved, move, capsys):
    storage = ["NfsStorage", {"server": "nas.example", "path": "/nni"}]
    kubernetes = {"operator": "frameworkcontroller", "storage": storage, "roles": [], "template": None}
    path = saved(training_service="frameworkcontroller", kubernetes=kubernetes)
    there = move("there")
    assert main.run(["experiment", "load", "-p", str(path)]) == 1
    err = capsys.readouterr().err
    assert "nas.example:/nni" in err
    assert "mount" in err
    assert list((there / "nni-experiments").iterdir()) == []


def test_an_archive_without_code_is_loaded_only_if_the_code_folder_exists(saved, move, capsys, here):
    path = saved()
    (here / "code").rename(here / "moved")
    there = move("there")
    assert main.run(["experiment", "load", "-p", str(path)]) == 1
    assert "it contains no code, and there is no folder " in capsys.readouterr().err
    assert list((there / "nni-experiments").iterdir()) == []
    assert main.run(["experiment", "load", "-p", str(path), "-c", str(here / "moved")]) == 0


def test_loading_does_not_overwrite_an_existing_experiment(saved, capsys):
    path = saved()
    capsys.readouterr()
    assert main.run(["experiment", "load", "-p", str(path)]) == 1
    assert capsys.readouterr().err == (
        f"ERROR: cannot load {path}: experiment abc11111 exists already; run `nnictl experiment delete abc11111` first\n"
    )


def test_a_load_is_refused_if_another_command_loads_the_experiment_at_the_same_time(
    saved, move, capsys, monkeypatch
):
    path = saved("--saveCodeDir")
    there = move("there")
    capsys.readouterr()
    make = ExperimentFolder.make

    def make_after_another(folder, storage=None):
        monkeypatch.setattr(ExperimentFolder, "make", make)
        assert main.run(["experiment", "load", "-p", str(path)]) == 0
        make(folder, storage)

    monkeypatch.setattr(ExperimentFolder, "make", make_after_another)
    assert main.run(["experiment", "load", "-p", str(path)]) == 1
    assert "experiment abc11111 exists already" in capsys.readouterr().err
    assert ExperimentFolder(there / "nni-experiments/abc11111").database.exists()


def test_an_experiment_is_not_saved_if_its_stored_state_is_running(saved, capsys, here):
    with pytest.raises(AssertionError):
        saved(state=ExperimentState.RUNNING)
    assert "cannot save experiment abc11111: its manager exited in state RUNNING" in capsys.readouterr().err
    assert sorted(path.name for path in here.iterdir()) == ["code", "nni-experiments", "state"]


def test_a_custom_tuner_is_loaded_from_the_saved_code_or_its_original_folder(saved, move, capsys, here):
    tuner = {"name": "mine", "optimize_mode": "maximize", "seed": None, "class_args": {}}
    for number, folder in enumerate((here / "code", here / "elsewhere")):
        own = {"class_name": "demo.Demo", "code_dir": str(folder), "validator": None, "call_timeout_s": 9.0}
        path = saved("-s", tuner=tuner | {"own": own})
        there = move(f"there{number}")
        capsys.readouterr()
        assert main.run(["experiment", "load", "-p", str(path)]) == 0
        out, err = capsys.readouterr()
        code = there / "nni-experiments/abc11111/saved-code"
        expected = here / "elsewhere" if number else code
        assert out.endswith(f"runs `python3 train.py` in {code} and demo.Demo of {expected}\n")
        assert (f"WARNING: there is no folder {expected}; put the code of demo.Demo there" in err) == bool(
            number
        )
        move("here")
        path.unlink()
        shutil.rmtree(here / "nni-experiments")
        shutil.rmtree(here / "code")


# ---- archives from untrusted sources


@pytest.mark.parametrize(
    "member",
    [
        a_member("../evil", size=1),
        a_member("/tmp/evil", size=1),
        a_member("trials/../../evil", size=1),
        a_member("trials/./evil", size=1),
        a_member("owner.lock", size=1),
        a_member("tls.pem", size=1),
        a_member("jobs/x.json", size=1),
        a_member("log", tarfile.SYMTYPE, "/etc"),
        a_member("trials/aB3dE/link", tarfile.SYMTYPE, "/etc/passwd"),
        a_member("trials/hard", tarfile.LNKTYPE, "experiment.sqlite"),
        a_member("trials/pipe", tarfile.FIFOTYPE),
        a_member("trials/device", tarfile.CHRTYPE),
        a_member("manifest.json/x", size=1),
    ],
    ids=lambda member: f"{member.name} {member.linkname}",
)
def test_an_archive_with_an_unexpected_member_is_rejected_and_leaves_no_files(
    saved, move, capsys, member, tmp_path
):
    path = repacked(saved("-s"), add=[member])
    there = move("there")
    assert main.run(["experiment", "load", "-p", str(path)]) == 1
    err = capsys.readouterr().err
    assert (
        f"ERROR: cannot load {path}: it is not an archive of `nnictl experiment save`, or it is incomplete"
        in err
    )
    assert list((there / "nni-experiments").iterdir()) == []
    assert list(tmp_path.rglob("evil")) == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trial SET trial_id = '../../evil'",
        "UPDATE trial SET job_id = 'a/b'",
        "UPDATE trial SET state = 'RUNNING'",
        "UPDATE trial SET parameters = 'no JSON'",
        "UPDATE trial SET metadata = '[]'",
        "UPDATE trial SET metadata = '{\"noted on the trial\": 5}'",
        "UPDATE attempt SET task = '../../evil'",
        "UPDATE attempt SET attempt_id = 'a/b'",
        "UPDATE attempt SET trial_id = '..'",
        "UPDATE remarks SET tags = '[\"two words\"]' WHERE trial_id = 'aB3dE'",
        "UPDATE remarks SET tags = '5'",
        f"UPDATE remarks SET note = '{'x' * 10_001}' WHERE trial_id = ''",
        "UPDATE experiment SET state = 'RUNNING'",
        "UPDATE experiment SET state = 'HAPPY'",
        "UPDATE experiment SET config = '{}'",
        "UPDATE experiment SET experiment_id = 'another1'",
        "INSERT INTO stream VALUES ('aB3dE', 0, '..', 'stdout', 0, 0)",
        "INSERT INTO stream VALUES ('aB3dE', 0, 'main', '../x', 0, 0)",
        "INSERT INTO job VALUES ('aB3dE', 1.0, NULL, 1)",
        "DELETE FROM experiment",
        "DROP TABLE metric",
        "DROP TABLE trial",
        "DROP TABLE experiment",
        "PRAGMA user_version = 999",
    ],
)
def test_an_archive_with_an_invalid_database_is_rejected_and_leaves_no_files(saved, move, capsys, statement):
    path = repacked(saved("-s"), lambda connection: connection.execute(statement))
    there = move("there")
    assert main.run(["experiment", "load", "-p", str(path)]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("ERROR: cannot ")
    assert "wait and try again" not in told
    assert (list((there / "nni-experiments").iterdir()), Registry.of_user().all()) == ([], [])


def test_triggers_and_extra_tables_of_a_loaded_database_are_not_copied(saved, move):
    def change(connection):
        connection.execute("CREATE TRIGGER evil AFTER INSERT ON trial BEGIN DELETE FROM metric; END")
        connection.execute("CREATE TABLE more (x)")

    path = repacked(saved("-s"), change)
    there = move("there")
    assert main.run(["experiment", "load", "-p", str(path)]) == 0
    connection = sqlite3.connect(there / "nni-experiments/abc11111/db/experiment.sqlite")
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert names.isdisjoint({"evil", "more"})


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\x00 cut"])
def test_a_file_that_is_not_an_archive_is_rejected_with_a_reason(here, capsys, content):
    (here / "x.tar.gz").write_bytes(content)
    assert main.run(["experiment", "load", "-p", str(here / "x.tar.gz")]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"ERROR: cannot load {here}/x.tar.gz: it is not an archive of ")
    assert (err.count("\n"), list((here / "nni-experiments").iterdir())) == (1, [])


def test_an_archive_that_was_truncated_at_any_position_is_rejected(saved, move, capsys):
    path = saved("-s")
    whole = path.read_bytes()
    move("there")
    for part in range(1, 8):
        path.write_bytes(whole[: len(whole) * part // 8])
        with pytest.raises(UserError, match="it is not an archive of"):
            archive.load(path, Locations(path.parent / "logs"))
    assert list((path.parent / "logs").iterdir()) == []


def test_links_in_saved_code_cannot_make_nnictl_write_files_outside_the_code_folder(
    saved, move, tmp_path, monkeypatch
):
    # Python before 3.10.12, and 3.11 before 3.11.4, lack this filter. The test removes it to simulate such a Python.
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    code = io.BytesIO()
    with tarfile.open(fileobj=code, mode="w:gz") as packed:
        packed.addfile(a_member("x", tarfile.DIRTYPE))
        packed.addfile(a_member("x/up", tarfile.SYMTYPE, ".."))
        # If only the text of the target is read, the target is x/evil inside the folder. If the link x/up is followed, the target
        # is ../evil outside the folder.
        packed.addfile(a_member("link", tarfile.SYMTYPE, "x/up/../evil"))
        packed.addfile(a_member("link", size=1), io.BytesIO(b"x"))
    path = saved("-s")
    new = path.with_name("y.tar.gz")
    with tarfile.open(path) as old, tarfile.open(new, "w:gz") as packed:
        for member in old:
            content = old.extractfile(member).read() if member.isreg() else b""
            if member.name == "code.tar.gz":
                content = code.getvalue()
                member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    move("there")
    assert main.run(["experiment", "load", "-p", str(new)]) == 1
    assert list(tmp_path.rglob("evil")) == []


class Evil:
    """An object that runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def a_cma_es():
    space = {"x": {"_type": "uniform", "_value": [0, 1]}, "y": {"_type": "uniform", "_value": [0, 1]}}
    config = object.__new__(ExperimentSpec)
    args = {"seed": 3, "popsize": 4, "optimize_mode": "minimize"}
    object.__setattr__(config, "tuner", TunerConfig("CmaEs", "minimize", 3, args))
    object.__setattr__(config, "search_space", parse_search_space(space))
    object.__setattr__(config, "search_space_revision", 0)
    object.__setattr__(config, "objectives", ())
    object.__setattr__(config, "constraints", ())
    return make_tuner(config)


def played(tuner, keys):
    past = []
    for key in keys:
        suggestion = tuner.ask(key)
        value = sum((each - 0.3) ** 2 for each in suggestion.parameters.values())
        tuner.tell(key, value)
        past.append(PastTrial(key, suggestion.parameters, suggestion.metadata, value, True))
    return past


def test_a_tuner_continues_from_trial_metadata_whose_pickles_were_removed(tmp_path):
    pytest.importorskip("cmaes")
    past = played(a_cma_es(), range(12))

    def with_pickle(metadata, hexadecimal):
        noted = json.loads(metadata.get("noted on the trial", "{}"))
        if any(name.startswith("cma:optimizer") for name in noted):
            noted = {name: each for name, each in noted.items() if not name.startswith("cma:optimizer")}
            noted["cma:optimizer:0"] = hexadecimal
        return dict(metadata) | {"noted on the trial": json.dumps(noted)}

    evil = pickle.dumps(Evil(tmp_path / "ran")).hex()
    foreign = [
        PastTrial(each.key, each.parameters, with_pickle(each.metadata, evil), each.value, True)
        for each in past
    ]
    assert any(evil in str(each.metadata) for each in foreign)
    safe = [
        PastTrial(
            each.key, each.parameters, json.loads(strip_pickles(json.dumps(each.metadata))), each.value, True
        )
        for each in foreign
    ]
    tuner = a_cma_es()
    tuner.restore(safe)
    again = played(tuner, range(12, 40))
    assert not (tmp_path / "ran").exists()
    # The restored tuner learns from its results: its last results are better than the first results before the restore.
    assert sum(each.value for each in again[-8:]) < sum(each.value for each in past[:8])


def test_loading_an_experiment_removes_pickles_from_the_trial_metadata(saved, move):
    path = saved(
        "-s", metadata={"/lr": 0.5, "noted on the trial": '{"cma:optimizer:0": "8004", "cma:generation": 2}'}
    )
    there = move("there")
    assert main.run(["experiment", "load", "-p", str(path)]) == 0
    with StoreReader(there / "nni-experiments/abc11111/db/experiment.sqlite") as reader:
        assert reader.trials()[0].metadata == {"/lr": 0.5, "noted on the trial": '{"cma:generation": 2}'}


def test_trial_metadata_without_pickles_is_kept():
    metadata = {
        "/x": 0.5,
        "noted on the trial": '{"generation": 3, "parents": [1, 2]}',
        "noted on the study": "{}",
    }
    assert json.loads(strip_pickles(json.dumps(metadata))) == metadata
