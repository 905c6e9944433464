"""The checks that nnictl runs before it starts an experiment."""

import socket

import pytest
from free_ports import free_port_pair
from stored_experiments import CONFIG

from nni_manager.client import manager_process
from nni_manager.client.preflight import free_ports, usable_ports
from nni_manager.config.reader import read_experiment_file
from nni_manager.errors import UserError
from nni_manager.training_services.local.command import check_command


@pytest.fixture
def with_command(tmp_path):
    (tmp_path / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (tmp_path / "config.yml").write_text(CONFIG)
    (tmp_path / "plain.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    config = read_experiment_file(tmp_path / "config.yml")
    return lambda command: config.replace(trial_command=command)


@pytest.mark.parametrize(
    "command",
    [
        "python3 train.py",
        "  cd sub && nothing-like-this",
        "if true; then nothing-like-this; fi",
        "./run.sh 1",
        "LR=1 nothing-like-this",
        "$PYTHON train.py",
        '"my python" train.py',
        "nothing-like-this() { python3 $1; }; nothing-like-this train.py",
        "nothing-like-this () { python3 $1; }; nothing-like-this train.py",
        "(cd sub; python3 train.py)",
        "# a comment\npython3 train.py",
        "~/bin/train",
        "set -e\nnothing-like-this",
    ],
)
def test_preflight_accepts_a_command_that_bash_might_run(with_command, command):
    check_command(with_command(command))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pyhton3 train.py", "cannot find the command 'pyhton3' of trial.command in config.yml: it is neither a "
         "program on PATH nor a builtin of bash; did you mean python3"),
        ("zzqqxxyy", "cannot find the command 'zzqqxxyy' of trial.command in config.yml: "),
        ("conda activate torch && python3 train.py", "cannot find the command 'conda' of trial.command in config.yml: it is "
         "neither a program on PATH nor a builtin of bash; a trial's shell does not read ~/.bashrc; write `eval \"$("),
        ("./absent.sh", "cannot find the command './absent.sh' of trial.command in config.yml: /"),
        ("./plain.sh 1", "cannot run the command './plain.sh' of trial.command in config.yml: "),
    ],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_rejected_with_a_remedy(with_command, command, expected):
    with pytest.raises(UserError) as caught:
        check_command(with_command(command))
    assert str(caught.value).startswith(expected)


def test_the_error_for_a_missing_script_suggests_a_script_with_a_similar_name(with_command, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").touch()
    check_command(with_command("python3 sub/train.py"))
    check_command(with_command("python3 sub/prepare.py && python3 sub/trian.py"))
    with pytest.raises(UserError) as caught:
        check_command(with_command("python3 sub/trian.py --fast"))
    assert str(caught.value) == (
        f"cannot find the script 'trian.py' of trial.command in config.yml: there is no file {tmp_path}/sub/trian.py; "
        "did you mean train.py? The path is relative to trial.codeDir"
    )


def test_preflight_messages_for_a_v2_file_use_the_keys_of_v2(tmp_path, monkeypatch):
    (tmp_path / "v2.yml").write_text(
        "trialConcurrency: 1\nsearchSpace: {x: {_type: uniform, _value: [0, 1]}}\ntrialCommand: ./absent.sh\n"
        "experimentWorkingDirectory: /dev/null/x\ntrainingService: {platform: local}\n"
    )
    config = read_experiment_file(tmp_path / "v2.yml")
    with pytest.raises(
        UserError, match=r"of trialCommand in v2.yml: .*, which is relative to trialCodeDirectory$"
    ):
        check_command(config)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"choose another experimentWorkingDirectory, or fix the disk$"):
        manager_process.create_experiment(config, [1], debug=False)


def test_an_experiment_that_cannot_be_registered_is_refused_and_the_error_names_xdg_state_home(
    with_command, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    config = with_command("true").replace(log_dir=tmp_path / "experiments")
    with pytest.raises(
        UserError, match=r"cannot register experiment .*/file/\.local.*; set XDG_STATE_HOME to a"
    ):
        manager_process.create_experiment(config, [1], debug=False)
    assert not (tmp_path / "experiments").exists()


def test_preflight_accepts_any_command_if_bash_has_a_command_not_found_handler(with_command, monkeypatch):
    monkeypatch.setenv("BASH_FUNC_command_not_found_handle%%", "() { python3; }")
    check_command(with_command("zzqqxxyy"))


def test_a_port_is_rejected_if_it_or_the_following_keeper_port_is_in_use(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    port = free_port_pair() + 1
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(
            UserError, match=f"cannot use port {port}: another program uses it; .*--port auto"
        ):
            usable_ports(port)
        with pytest.raises(UserError, match=f"cannot use port {port} .keepers connect"):
            usable_ports(port - 1)


def test_automatically_chosen_ports_are_free_pairs_that_do_not_overlap():
    ports = free_ports()
    first, second = next(ports), next(ports)
    assert second >= first + 2


@pytest.mark.parametrize(
    "check", [lambda host: usable_ports(8080, host), lambda host: next(free_ports(host))]
)
@pytest.mark.parametrize(
    ("host", "expected"),
    [("", "cannot use --host '': the address is empty; "), (" ", "cannot use --host ' ': the address is empty; "),
     ("ü..b", "cannot use --host ü..b: "), ("192.0.2.7", "cannot use --host 192.0.2.7: ")],
)  # fmt: skip
def test_a_host_that_is_not_an_address_of_this_machine_is_rejected(check, host, expected):
    with pytest.raises(UserError) as caught:
        check(host)
    assert str(caught.value).startswith(expected)
    assert str(caught.value).endswith("; write an address of this machine, or 0.0.0.0 for all of them")
