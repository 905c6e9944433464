"""Experiments on machines over SSH, as users run them with nnictl."""

import contextlib
import getpass
import json
import re
import shutil
import socket
from pathlib import Path

import psutil
import pytest
from bash_trial import TRAIN_SH
from free_ports import free_port_pair
from password_ssh import a_password_machine
from real_containers import podman_of_tests
from real_experiment import wait_until
from ssh_machines import make_key, ssh_machines_here
from user_home import BIN, left_in, metrics_of, run_nnictl

from nni_manager.training_services.remote import frames
from trial_keeper import __version__
from trial_keeper.wire.documents import ManagerDocument

ROOT = Path(__file__).parents[2]
FILE = "digits/config.yml"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def site(tmp_path):
    with ssh_machines_here(tmp_path, "one", "two") as site:
        yield site


@pytest.fixture
def work(site):
    """A folder with the digits example. It lies in the home of a user who can log in to the machines."""
    folder = site.home / "work"
    shutil.copytree(ROOT / "examples" / "digits", folder / "digits")
    return folder


@pytest.fixture
def nnictl(site, work):
    def run(*arguments, **environ):
        return run_nnictl(work, site.variables | environ, *arguments)

    return run


def write(work, service, **changes):
    """Write an experiment file of four trials, with this training service."""
    document = {
        "trialConcurrency": 2,
        "maxTrialNumber": 4,
        "searchSpaceFile": "search_space.json",
        "trialCodeDirectory": ".",
        "trialCommand": "python3 train.py",
        "tuner": {"name": "Random", "classArgs": {"seed": 1, "optimize_mode": "maximize"}},
        "trainingService": service,
        **changes,
    }
    (work / FILE).write_text(json.dumps(document))


def remote(site, reuse=False, **keys):
    user = getpass.getuser()
    return {"platform": "remote", "reuseMode": reuse, "machineList": site.machine_list(user=user, **keys)}


def create(nnictl, *options):
    return nnictl("create", "--config", FILE, "--port", str(free_port_pair()), *options)


def run(nnictl):
    """Run the experiment to its end; returns its id and its trials."""
    done = create(nnictl, "--foreground")
    assert done.returncode == 0, done.stdout + done.stderr
    (experiment_id,) = re.findall(r"The experiment id is (\w+)", done.stdout)
    return experiment_id, json.loads(nnictl("trial", "ls", experiment_id, "--json").stdout)


def results(trials):
    return sorted((json.dumps(each["parameters"], sort_keys=True), each["value"]) for each in trials)


def words(text):
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("reuse", [False, True])
def test_the_digits_example_has_the_same_results_on_two_remote_machines_as_on_this_machine(
    site, work, nnictl, reuse
):
    write(work, {"platform": "local"})
    here_id, _ = run(nnictl)
    write(work, remote(site, reuse))
    experiment_id, there = run(nnictl)
    assert [each["status"] for each in there] == ["SUCCEEDED"] * 4
    assert metrics_of(nnictl, experiment_id) == metrics_of(nnictl, here_id)
    roots = [each.home / ".cache" / "trial-keeper" for each in site.machines.values()]
    used = [root for root in roots if [*root.glob(f"*/{experiment_id}/trials/*/attempts/*/*/exit.json")]]
    assert used == roots or (reuse and used), "a reused job may run all trials before the other has started"
    assert all(root.stat().st_mode & 0o777 == 0o700 for root in roots)
    log = nnictl("log", "trial", "--trial_id", there[0]["id"], experiment_id)
    assert log.returncode == 0, log.stderr
    deleted = nnictl("experiment", "delete", experiment_id, "--yes")
    assert deleted.returncode == 0, deleted.stdout + deleted.stderr
    assert not [path for root in roots for path in root.glob("*/*/*")]
    assert left_in(work) == []
    wait_until(lambda: not site.processes(), "nothing runs on the machines")


def test_machines_can_be_named_by_their_host_aliases_in_the_ssh_configuration(site, work, nnictl):
    key = site.key.rename(site.home / "another-key")
    site.key.with_suffix(".pub").unlink()
    (site.home / ".ssh" / "config").write_text(
        "".join(
            f"Host gpu-{name}\n  HostName 127.0.0.1\n  Port {each.port}\n  IdentityFile {key}\n"
            for name, each in site.machines.items()
        )
        + "  ProxyJump gpu-one\n"
        "Host *\n  RequestTTY force\n  ForwardAgent yes\n"
    )
    for machine in site.machines.values():
        (machine.home / ".bashrc").write_text("echo Welcome to this machine!\n")
    write(work, {"platform": "remote", "machineList": [{"host": f"gpu-{name}"} for name in site.machines]})
    _, trials = run(nnictl)
    assert [each["status"] for each in trials] == ["SUCCEEDED"] * 4


# ---- machines that nnictl create refuses


def refused(nnictl):
    done = create(nnictl)
    assert done.returncode == 1, done.stdout
    return words(done.stderr)


@pytest.mark.smoke
def test_an_unknown_host_key_is_refused(site, work, nnictl):
    write(work, remote(site))
    site.known_hosts.write_text(site.machines["one"].known_host)
    two = site.machines["two"]
    said = refused(nnictl)
    assert f"cannot trust {getpass.getuser()}@127.0.0.1:{two.port}: its host key is not the one in" in said
    assert f"ssh-keyscan -p {two.port} 127.0.0.1" in said
    assert str(site.machines["one"].port) not in said


def test_a_changed_host_key_is_refused(site, work, nnictl):
    write(work, remote(site))
    one, two = (each.known_host for each in site.machines.values())
    site.known_hosts.write_text(one + two.rpartition(" ")[0] + " " + one.split()[-1] + "\n")
    assert "cannot trust" in refused(nnictl)


def test_machines_that_do_not_authorise_the_ssh_key_are_refused(site, work, nnictl):
    make_key(site.home / "other")
    write(work, remote(site, sshKeyFile=str(site.home / "other")))
    said = refused(nnictl)
    assert said.count("cannot log in to") == 2
    assert "check user, key and password" in said


def test_a_machine_without_trial_keeper_is_refused_and_the_error_has_the_install_command(site, work, nnictl):
    write(work, remote(site))
    machine = site.machines["two"]
    machine.set_path("/usr/bin:/bin")
    said = refused(nnictl)
    assert f"127.0.0.1:{machine.port}: it has no trial-keeper on PATH" in said
    assert f"run `pip install .` in a checkout of trial-keeper {__version__} there" in said


@pytest.mark.smoke
def test_machines_with_an_outdated_keeper_or_without_a_keeper_run_the_bundled_keeper(
    site, work, nnictl, tmp_path
):
    """One machine has an old keeper, and a Python of another version than the manager's. The other machine has neither a keeper
    nor a Python.
    """
    without_python = tmp_path / "without-python"
    without_python.mkdir()
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith(("python", "trial-keeper")):
            (without_python / program.name).symlink_to(program)
    one, two = site.machines.values()
    one.set_path("/usr/bin:/bin")
    # This fake keeper reports version 0.1.0, so the manager must send the bundled keeper to machine `one`.
    (tmp_path / "hello").write_bytes(frames.START + frames.encode({"version": "0.1.0", "python": "old"}))
    (one.bin / "trial-keeper").write_text(f"#!/bin/bash\ncat {tmp_path / 'hello'}\nexec cat > /dev/null\n")
    (one.bin / "trial-keeper").chmod(0o755)
    two.set_path(str(without_python))
    (work / "digits" / "train.sh").write_text(TRAIN_SH)
    (work / "digits" / "search_space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
    environ = {"PYTHONPATH": str(podman_of_tests().bundle())}

    def with_bundle(*arguments):
        return nnictl(*arguments, **environ)

    write(work, {"platform": "local"}, trialCommand="bash train.sh")
    _, here = run(nnictl)
    write(work, remote(site), trialCommand="bash train.sh")
    _, there = run(with_bundle)
    assert [each["status"] for each in there] == ["SUCCEEDED"] * 4
    assert results(there) == results(here)
    kept = [each.home / ".cache" / "trial-keeper" / "bundle" for each in (one, two)]
    own, frozen = (next(folder.iterdir()) for folder in kept)
    assert (own / "keeper" / "libraries.zip").is_file()
    assert (frozen / "keeper" / "_internal").is_dir()
    # In the second run, the manager does not send the bundle, and the machines reuse the unpacked files.
    inodes = own.stat().st_ino, frozen.stat().st_ino
    run(with_bundle)
    assert (own.stat().st_ino, frozen.stat().st_ino) == inodes
    assert [len([*folder.iterdir()]) for folder in kept] == [1, 1]
    assert not site.processes()


def test_the_config_key_pythonpath_makes_the_installed_trial_keeper_available(site, work, nnictl):
    write(work, remote(site, pythonPath=str(BIN)))
    for machine in site.machines.values():
        machine.set_path("/usr/bin:/bin")
    _, trials = run(nnictl)
    assert [each["status"] for each in trials] == ["SUCCEEDED"] * 4


def test_a_machine_is_refused_if_its_version_of_trial_keeper_differs_from_the_managers(site, work, nnictl):
    write(work, remote(site))
    machine = site.machines["one"]
    program = machine.bin / "trial-keeper"
    program.write_text(
        f"#!{BIN / 'python'}\nimport trial_keeper\ntrial_keeper.__version__ = '0.1.2'\n"
        "from trial_keeper.__main__ import main\nmain()\n"
    )
    program.chmod(0o755)
    said = refused(nnictl)
    assert f"its trial-keeper is 0.1.2, and the manager is {__version__}" in said


def test_a_machine_that_does_not_answer_is_refused(site, work, nnictl):
    write(work, remote(site))
    site.machines["one"].stop()
    assert f"127.0.0.1:{site.machines['one'].port} over SSH" in refused(nnictl)


# ---- secrets

PASSWORD, PASSPHRASE = "pass-word-7Gx", "pass-phrase-9Qz"


def files_with(folder, *secrets):
    """The files below a folder that contain one of the secrets."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in secrets):
            found.append(path)
    return found


def test_secrets_are_only_in_the_experiment_file_and_the_private_database(site, work, nnictl, tmp_path):
    key = site.home / "protected-key"
    make_key(key, PASSPHRASE)
    one = site.machines["one"]
    shutil.copyfile(f"{key}.pub", one.folder / "authorized_keys")
    user = getpass.getuser()
    seen = []
    with a_password_machine(tmp_path, tmp_path / "home3", f"{BIN}:/usr/bin:/bin", PASSWORD) as (port, known):
        with site.known_hosts.open("a") as known_hosts:
            known_hosts.write(known)
        login = {"sshKeyFile": str(key), "sshPassphrase": PASSPHRASE}
        machines = [
            {"host": "127.0.0.1", "port": one.port, "user": user, **login},
            {"host": "127.0.0.1", "port": port, "user": user, "password": PASSWORD},
        ]
        train = "import os, time\nimport nni_sdk\nnni_sdk.get_next_parameter()\n"
        train += f"open({str(tmp_path / 'ran')!r}, 'a').write(os.environ['MACHINE'] + '\\n')\n"
        train += f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)\n"
        train += "nni_sdk.report_final_result(1.0)\n"
        (work / "digits" / "train.py").write_text(train)
        write(work, {"platform": "remote", "machineList": machines}, maxTrialNumber=2)
        created = create(nnictl, "--debug")
        assert created.returncode == 0, created.stdout + created.stderr
        (experiment_id,) = re.findall(r"The experiment id is (\w+)", created.stdout)
        ran = tmp_path / "ran"
        wait_until(lambda: ran.exists() and len(ran.read_text().splitlines()) == 2, "both trials run")
        assert {*ran.read_text().split()} == {"one", "password"}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words_of = [*process.cmdline(), *process.environ().values()]
                seen += [process for word in words_of if PASSWORD in word or PASSPHRASE in word]
        (tmp_path / "go").touch()

        def statuses():
            trials = json.loads(nnictl("trial", "ls", experiment_id, "--json").stdout)
            return [trial["status"] for trial in trials]

        wait_until(lambda: statuses() == ["SUCCEEDED"] * 2, "both trials are done")
        shown = nnictl("experiment", "show", experiment_id).stdout + created.stdout + created.stderr
        assert nnictl("stop", experiment_id).returncode == 0
        wait_until(lambda: not left_in(work), "the manager has ended")
    assert not seen
    assert PASSWORD not in shown
    assert PASSPHRASE not in shown
    found = files_with(tmp_path, PASSWORD, PASSPHRASE)
    assert work / FILE in found
    private = [path for path in found if path != work / FILE]
    assert private, "the database has them for nnictl resume"
    assert {path.suffix for path in private} <= {".sqlite", ".sqlite-wal", ".db", ".db-wal"}, private
    assert all(path.stat().st_mode & 0o077 == 0 for path in private)


# ---- connections from keepers to the manager


@pytest.mark.parametrize("is_reachable", [True, False])
def test_keepers_connect_with_tls_directly_if_possible_and_otherwise_through_the_tunnel(
    site, work, nnictl, is_reachable
):
    # RFC 5737 reserves 192.0.2.1 for documentation. No machine has this address, so keepers can connect only through the tunnel.
    here = own_address() if is_reachable else "192.0.2.1"
    write(work, remote(site, reuse=True), nniManagerIp=here)
    experiment_id, trials = run(nnictl)
    assert [each["status"] for each in trials] == ["SUCCEEDED"] * 4
    for machine in site.machines.values():
        (file,) = machine.home.glob(f".cache/trial-keeper/*/{experiment_id}/manager.json")
        document = ManagerDocument.from_bytes(file.read_bytes())
        assert document.certificate is not None
        *direct, tunnel = document.addresses
        assert tunnel.startswith("unix:/")
        assert [address.partition(":")[0] for address in direct] == ([here] if is_reachable else [])


def own_address():
    """An address of this machine on a network."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family is socket.AF_INET and not each.address.startswith("127."):
                return each.address
    pytest.skip("this machine has no address but loopback")
