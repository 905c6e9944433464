"""How nnictl selects the experiment of a command, and how it lists experiments."""

import json
import os
import shutil
from pathlib import Path

import psutil
import pytest
from stored_experiments import finished

from nni_manager.cli import options
from nni_manager.client.experiments import register, resolve
from nni_manager.errors import NniManagerError
from nni_manager.store.registry import Registry

pytestmark = pytest.mark.usefixtures("state_home")


def test_a_command_selects_an_experiment_by_id_or_prefix_and_defaults_to_the_only_running_experiment(
    an_experiment,
):
    an_experiment("abc11111")
    an_experiment("abd22222", port=9000)
    an_experiment("abc11111x")
    assert resolve("abc11111").experiment_id == "abc11111"
    assert resolve("abd").experiment_id == "abd22222"
    assert resolve(None).experiment_id == "abd22222"
    assert resolve(None).manager.port == 9000


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (None, "cannot choose among 2 running experiments; name one of abc11111 (port 9000), abd22222 (port 9002)"),
        ("ab", "cannot use experiment id 'ab': several ids start with it: abc11111 (port 9000), abd"),
        ("abc11112", "cannot find experiment 'abc11112'; did you mean abc11111? "),
        ("", "cannot find experiment ''; "),
    ],
)  # fmt: skip
def test_an_ambiguous_or_unknown_experiment_id_is_an_error(an_experiment, prefix, expected):
    an_experiment("abc11111", port=9000)
    an_experiment("abd22222", port=9002)
    with pytest.raises(NniManagerError) as caught:
        resolve(prefix)
    assert str(caught.value).startswith(expected)


def test_nnictl_experiment_list_shows_the_resume_command_for_a_dead_manager(nnictl, an_experiment):
    an_experiment("abc11111")
    code, out, err = nnictl("experiment", "list", "--all")
    assert code == 0
    assert "NOT RUNNING (was INITIALIZED)" in out
    assert err == ("WARNING: the manager of experiment abc11111 died; `nnictl resume abc11111` resumes it\n")
    assert nnictl("experiment", "list")[1].startswith("INFO: There is no running experiment; ")
    (line,) = json.loads(nnictl("experiment", "list", "--all", "--json")[1])
    assert (line["id"], line["status"], line["managerIsRunning"]) == ("abc11111", "INITIALIZED", False)


def test_a_corrupt_database_does_not_hide_other_experiments(nnictl, an_experiment):
    an_experiment("abc11111").database.write_bytes(b"corrupt" * 1000)
    an_experiment("abd22222")
    code, out, err = nnictl("experiment", "list", "--all")
    assert code == 0
    assert "abd22222" in out
    assert "UNREADABLE" in out
    assert "WARNING: experiment abc11111: cannot " in err


@pytest.mark.parametrize(
    "corrupt", [b"", b"[]", b'{"path": "x"}', b'{"folder": 1}', b"\xff", Path.mkdir, os.mkfifo]
)
def test_a_corrupt_registry_entry_does_not_hide_other_experiments(nnictl, an_experiment, corrupt):
    an_experiment("abc11111")
    entry = Registry.of_user().folder / "abc11111.json"
    entry.unlink()
    is_file = isinstance(corrupt, bytes)
    entry.write_bytes(corrupt) if is_file else corrupt(entry)
    an_experiment("abd22222")
    code, out, err = nnictl("experiment", "list", "--all")
    assert (code, [line.split()[:2] for line in out.splitlines()[1:]]) == (
        0,
        [["abc11111", "UNREADABLE"], ["abd22222", "NOT"]],
    )
    why = "it does not name the experiment's folder" if is_file else "it is a "
    problem = f"cannot {'read' if is_file else 'use'} {entry}: {why}"
    assert f"WARNING: experiment abc11111: {problem}" in err
    code, _, err = nnictl("trial", "ls", "abc11111")
    assert (code, err.startswith(f"ERROR: {problem}")) == (1, True)
    assert nnictl("trial", "ls", "abd22222")[0] == 0


def test_an_experiment_can_be_registered_by_its_folder(nnictl, an_experiment, tmp_path, monkeypatch):
    folder = an_experiment("abc11111")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert nnictl("trial", "ls", "abc11111")[0] == 1
    (tmp_path / "link").symlink_to(folder.path.parent)
    for experiment_id, path in (
        ("abc11111", folder.path),
        (None, folder.path),
        (None, tmp_path / "link" / "abc11111"),
    ):
        assert register(path, experiment_id) == "abc11111"
    assert nnictl("trial", "ls", "abc11111")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["nothing"],
            "cannot use nothing as an experiment: it has no folder db; name the experiment's own folder",
        ),
        (
            ["abc11111", "abd22222"],
            "cannot find experiment 'abd22222' in abc11111: it has experiment abc11111; use ",
        ),
        (
            ["copy/abc11111"],
            "cannot add experiment abc11111 of copy/abc11111: this user has another one with that id",
        ),
    ],
)
@pytest.mark.parametrize("command", ["resume", "view"])
def test_an_experiment_folder_other_than_the_registered_folder_is_refused(
    nnictl, an_experiment, monkeypatch, command, arguments, problem
):
    folder = an_experiment("abc11111").path
    monkeypatch.chdir(folder.parent)
    shutil.copytree(folder, "copy/abc11111")
    code, _, err = nnictl(command, "--experiment_dir", *arguments)
    assert (code, err.startswith(f"ERROR: {problem}")) == (1, True), err
    assert [each.path for each in Registry.of_user().all()] == [folder]


@pytest.mark.parametrize(
    "command",
    ["trial ls", "experiment show", "experiment export", "experiment status", "log stderr --path"],
)
def test_a_command_without_an_id_uses_the_latest_experiment_and_prints_its_id(nnictl, an_experiment, command):
    for number, name in enumerate(("abd22222", "abc11111", "abe33333")):
        finished(an_experiment(name), 0.5)
        entry = Registry.of_user().folder / f"{name}.json"
        os.utime(entry, (number % 2, number % 2))
    an_experiment("abf44444").database.unlink()
    os.utime(Registry.of_user().folder / "abf44444.json", (9, 9))
    code, out, err = nnictl(*command.split())
    assert err.startswith("INFO: no experiment is running; this is the latest, abc11111\n")
    assert code == 0
    assert nnictl(*command.split(), "abc11111")[1] == out


def test_a_command_without_an_id_prefers_a_running_experiment(an_experiment, capsys):
    an_experiment("abc11111", port=9000)
    an_experiment("abd22222")
    assert options.experiment(None).experiment_id == "abc11111"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("corrupt", [b"", b"[]", b"{}", b'{"pid": 1'])
def test_a_corrupt_manager_process_file_does_not_hide_other_experiments(nnictl, an_experiment, corrupt):
    folder = an_experiment("abc11111", port=9000)
    (folder.path / "manager-process.json").write_bytes(corrupt)
    an_experiment("abd22222")
    lines = json.loads(nnictl("experiment", "list", "--all", "--json")[1])
    assert [(line["id"], line["status"]) for line in lines] == [
        ("abc11111", "UNREADABLE"),
        ("abd22222", "INITIALIZED"),
    ]
    assert lines[0]["problem"].startswith(f"cannot read {folder.path}/manager-process.json: ")
    assert nnictl("trial", "ls", "abd22222")[0] == 0


def test_the_check_for_a_running_manager_opens_the_lock_file_read_only(nnictl, an_experiment, monkeypatch):
    folder = an_experiment("abc11111")
    with folder.owned():
        pass
    opened = []
    really_open = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *rest: (opened.append((path, flags)), really_open(path, flags, *rest))[1],
    )
    assert folder.running_process() is None
    assert opened == [(folder.path / "owner.lock", os.O_RDONLY | os.O_CLOEXEC)]


def test_a_lock_file_that_cannot_be_opened_does_not_hide_other_experiments(nnictl, an_experiment):
    folder = an_experiment("abc11111")
    lock = folder.path / "owner.lock"
    lock.symlink_to(lock)  # even root cannot open a symlink loop
    an_experiment("abd22222")
    code, out, err = nnictl("experiment", "list", "--all")
    assert (code, "UNREADABLE" in out, "abd22222" in out) == (0, True, True)
    assert "WARNING: experiment abc11111: cannot determine whether experiment abc11111 runs: " in err


def test_one_process_scan_suffices_to_remove_all_deleted_experiments_from_the_registry(
    nnictl, an_experiment, monkeypatch
):
    for name in ("abc11111", "abd22222"):
        shutil.rmtree(an_experiment(name).path)
    scans = []
    really_scan = psutil.process_iter
    monkeypatch.setattr(psutil, "process_iter", lambda attrs: (scans.append(attrs), really_scan(attrs))[1])
    assert nnictl("experiment", "list", "--all")[1] == "INFO: There is no experiment\n"
    assert len(scans) == 1
