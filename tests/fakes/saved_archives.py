"""A saved experiment with one trial, and modified archives."""

import io
import json
import sqlite3
import tarfile

from nni_manager.cli import main
from nni_manager.config.reader import read_experiment_file
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.remarks import Remarks
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.registry import Registry
from nni_manager.store.rows import attempt_row, experiment_row, remarks_row, trial_row
from nni_manager.store.writer import Store
from trial_keeper.wire.messages import AttemptKey

CONFIG = """\
experimentName: digits
authorName: ada
trialConcurrency: 2
trainingServicePlatform: local
searchSpacePath: search_space.json
tuner: {builtinTunerName: Random, classArgs: {seed: 1}}
trial: {command: python3 train.py, codeDir: .}
"""
SECRET = b"the secret of keepers"


def unpack(archive, folder):
    """Extract an archive that the tests have made. The extraction filter is set if this Python has one: some versions of Python
    demand it, and older ones lack it.
    """
    with tarfile.open(archive) as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)
        file.extractall(folder)  # noqa: S202 - we have made the archive


def move_to(monkeypatch, path):
    """Simulate a move to another machine: set an empty folder as the home."""
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(path / "state"))
    path.mkdir(exist_ok=True)
    return path


def save_an_experiment(here, *options, metadata=None, state=ExperimentState.DONE, **changes):
    """Create an experiment in this home and save it; return the archive."""
    code = here / "code"
    code.mkdir()
    (code / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (code / "train.py").write_text("print(1)\n")
    (code / "config.yml").write_text(CONFIG)
    config = read_experiment_file(code / "config.yml")
    fields = json.loads(config.to_json()) | changes
    folder = ExperimentFolder(config.log_dir / "abc11111")
    folder.make()
    store = Store.create(folder.database, folder.collected_logs, "abc11111", json.dumps(fields), SECRET, 1.0)
    trial = Trial(
        "aB3dE",
        0,
        {"lr": 0.5},
        metadata or {"/lr": 0.5},
        1.0,
        "aB3dE",
        TrialState.SUCCEEDED,
        run=TrialRun(attempt=0),
    )
    trial.run.final, trial.run.value = "0.25", 0.25
    key = AttemptKey("aB3dE", "0", "main-0")
    store.commit([attempt_row(key, 0), trial_row(trial), experiment_row(state, "", 9.0, 10.0, True)], 1.0)
    store.commit([remarks_row("aB3dE", Remarks(("keep",))), remarks_row(None, Remarks((), "ours"))], 1.0)
    store.close()
    Registry.of_user().add(folder)
    output = folder.workspace.trials / "aB3dE/attempts/0/main-0/output"
    output.mkdir(parents=True)
    (output / "stdout").write_text("hello\n")
    (output / "latest").symlink_to("/etc/passwd")
    (output / "folder").symlink_to("/etc")
    (folder.workspace.root / "checkpoints/0").mkdir(parents=True)
    (folder.workspace.root / "checkpoints/0/model").write_text("weights")
    (output.parent / "code").mkdir()
    (output.parent / "code/copy.py").write_text("of the code\n")
    (output.parent / "checkpoints/000001").mkdir(parents=True)
    (folder.path / "tls.pem").write_text("a key")
    folder.manager_log.write_text("decided\n")
    assert main.run(["experiment", "save", "abc", "--path", str(here / "x.tar.gz"), *options]) == 0
    return here / "x.tar.gz"


def repacked(path, change=None, add=()):
    """A copy of the archive with added members. `change` receives a connection to the archive's database and modifies the
    database.
    """
    new = path.with_name("y.tar.gz")
    with tarfile.open(path) as old, tarfile.open(new, "w:gz") as packed:
        for member in old:
            content = old.extractfile(member).read() if member.isreg() else b""
            if change is not None and member.name == "experiment.sqlite":
                database = path.with_name("changed.sqlite")
                database.write_bytes(content)
                connection = sqlite3.connect(database)
                change(connection)
                connection.commit()
                connection.close()
                content = database.read_bytes()
                member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
        for member in add:
            packed.addfile(member, io.BytesIO(b"x" * member.size))
    return new


def a_member(name, kind=tarfile.REGTYPE, target="", size=0):
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, target, size
    return member
