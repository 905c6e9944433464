"""The doctor in healthy and in broken containers."""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
from deadlines import DEADLINE_S, scaled_s
from fake_manager import EXPERIMENT, TRIAL
from gpu_drivers import AMD, NVIDIA, build_driver
from real_experiment import wait_until
from strangers import give_away

from nni_manager.domain.admission_errors import UnknownJob, VersionRefused
from nni_manager.engine.tokens import token_of
from nni_manager.store.reader import StoreReader
from trial_keeper import __version__
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import Hello, TrialStarted


class Report:
    """A doctor's findings, by check."""

    def __init__(self, done):
        assert done.stderr == ""
        self.code = done.returncode
        self.text = done.stdout
        self.findings = json.loads(done.stdout)

    def all_of(self, check):
        return [finding for finding in self.findings if finding["check"] == check]

    def outcomes(self, check):
        return [finding["outcome"] for finding in self.all_of(check)]

    def words(self, check):
        return " / ".join(f"{finding['found']}; {finding['remedy']}" for finding in self.all_of(check))

    @property
    def failed(self):
        return sorted({finding["check"] for finding in self.findings if finding["outcome"] == "FAIL"})


def run_doctor(environ, *arguments, prefix=()):
    return subprocess.run(
        [*prefix, sys.executable, "-m", "trial_keeper", "doctor", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.fixture
def run_checks(site):
    """Return a function that runs the doctor in the environment of the site's keeper, with some settings changed."""

    def run(*, prefix=(), without=(), **overrides):
        environ = site.environ | site.settings(**overrides).to_environ()
        for name in without:
            del environ[name]
        report = Report(run_doctor(environ, "--json", prefix=prefix))
        assert (report.code == 1) == bool(report.failed)
        return report

    return run


# ---- a healthy container


def test_the_doctor_prints_one_line_per_check_in_a_healthy_container(site):
    done = run_doctor(site.environ | site.settings().to_environ())
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == "no check failed"
    assert [line.split()[1] for line in lines[:-1]] == [
        "settings", "bash", "mount", "write", "space", "clock", "manager", "version", "name", "tcp", "tls", "grpc", "gpu",
        "nnictl",
    ]  # fmt: skip
    assert {line.split()[0] for line in lines[:-1]} <= {"OK", "SKIP", "WARN"}
    assert f"experiment {EXPERIMENT}, job {TRIAL}" in lines[0]
    assert site.settings().token not in done.stdout
    assert " ms" in lines[9]
    assert f"manager {__version__} at {site.manager.address} accepted job {TRIAL} in" in lines[11]


def test_the_doctor_connects_as_a_probe_and_leaves_no_files(site, run_checks):
    before = sorted(site.workspace.root.iterdir())
    assert run_checks().code == 0
    assert [hello.is_probe for hello in site.manager.all_of(Hello)] == [True]
    assert sorted(site.workspace.root.iterdir()) == before


def test_the_doctor_does_not_disturb_the_link_of_a_running_keeper(site, run_checks):
    site.gate("gate")
    site.add_trial("read -r < gate || true")
    keeper = site.start_keeper()
    site.manager.wait_for_message(TrialStarted)
    assert run_checks().code == 0
    assert site.manager.connections == 1
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert [hello.is_probe for hello in site.manager.all_of(Hello)] == [False, True]
    assert "link to the manager is down" not in keeper.stderr


def test_the_doctor_connects_to_a_real_manager_without_disturbing_its_keeper(a_real_experiment):
    train = (
        "import time\nimport nni_sdk as nni\nnni.get_next_parameter()\n"
        "nni.report_intermediate_result(1)\ntime.sleep(600)\n"
    )
    experiment = a_real_experiment(train, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    wait_until(lambda: experiment.row_count() == 1, "the trial reports")
    job_id = experiment.get("/trials")[0]["id"]
    with StoreReader(experiment.folder.database) as reader:
        token = token_of(reader.experiment().secret, job_id)
    settings = KeeperSettings("TESTEXPT", job_id, str(experiment.folder.workspace.root), token, job_id)
    report = Report(run_doctor(experiment.environ | settings.to_environ(), "--json"))
    assert report.failed == []
    assert report.outcomes("grpc") == ["OK"]
    wrong = dataclasses.replace(settings, token="wrong")
    report = Report(run_doctor(experiment.environ | wrong.to_environ(), "--json"))
    assert (report.failed, "the token is refused" in report.words("grpc")) == (["grpc"], True)
    assert experiment.summary()["keepers"] == 1
    assert "disconnected" not in experiment.folder.manager_log.read_text()


# ---- settings


def test_missing_settings_fail_only_the_settings_check(site, run_checks):
    report = run_checks(without=["TRIAL_KEEPER_TOKEN", "TRIAL_KEEPER_TRIAL_ID"])
    assert report.failed == ["settings"]
    assert "TRIAL_KEEPER_TOKEN is not set" in report.words("settings")
    assert report.outcomes("tcp") == ["OK"]
    assert report.outcomes("grpc") == ["SKIP"]
    assert "without token" in report.words("grpc")


def test_mount_and_network_are_checked_even_if_all_other_settings_are_missing(site, run_checks):
    names = ("EXPERIMENT_ID", "JOB_ID", "TOKEN", "TRIAL_ID")
    report = run_checks(without=[f"TRIAL_KEEPER_{name}" for name in names])
    assert report.failed == ["settings"]
    assert [report.outcomes(check) for check in ("mount", "manager", "tcp")] == [["OK"]] * 3


# ---- the shared storage


def test_a_missing_mount_fails_the_mount_check_and_the_message_shows_the_existing_part_of_the_path(
    site, run_checks, tmp_path
):
    report = run_checks(workspace=str(tmp_path / "nowhere" / EXPERIMENT))
    assert report.failed == ["manager", "mount", "write"]
    assert f"the path exists only up to {tmp_path}" in report.words("mount")
    assert report.outcomes("tcp") == ["SKIP"]


def test_a_file_in_place_of_the_mount_fails_the_mount_check(site, run_checks, tmp_path):
    (tmp_path / "file").touch()
    report = run_checks(workspace=str(tmp_path / "file"))
    assert report.failed == ["manager", "mount", "write"]
    assert "Not a directory" in report.words("mount")


def test_an_empty_folder_in_place_of_the_mount_fails_the_mount_and_manager_checks(site, run_checks, tmp_path):
    (tmp_path / "empty").mkdir()
    report = run_checks(workspace=str(tmp_path / "empty"))
    assert report.failed == ["manager", "mount"]
    assert (
        "empty is empty (a keeper ends with 101); mount the manager's shared storage there"
        in report.words("mount")
    )
    assert "check that the mounted folder is the experiment's" in report.words("manager")
    assert [report.outcomes(check) for check in ("write", "clock")] == [["OK"]] * 2


def mounting(script):
    """A command prefix that runs `script` in a new mount namespace. The script may change mounts there."""
    prefix = ("unshare", "--map-root-user", "--mount", "bash", "-ec", f'{script}; exec "$@"', "-")
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare and the right to mount")
    return prefix


def test_a_read_only_mount_fails_the_write_check(site, run_checks):
    root = site.workspace.root
    report = run_checks(prefix=mounting(f"mount --bind {root} {root}; mount -o remount,bind,ro {root}"))
    assert report.failed == ["write"]
    assert report.words("write").endswith(
        "Read-only file system (a keeper ends with 111); mount it read-write"
    )
    assert report.outcomes("clock") == ["SKIP"]
    assert report.outcomes("grpc") == ["OK"]


def test_a_full_mount_fails_the_space_and_write_checks(site, run_checks):
    root, copy = site.workspace.root, site.workspace.root.parent / "manager.json"
    shutil.copy(site.workspace.manager_json, copy)
    fill = f"cp {copy} {root}; cat /dev/zero > {root}/filler 2> {os.devnull} || true"
    report = run_checks(prefix=mounting(f"mount -t tmpfs -o size=64k none {root}; {fill}"))
    assert report.failed == ["space", "write"]
    assert "No space left on device (a keeper ends with 112); free some space there" in report.words("write")
    assert "0.0 MiB of 0.1 MiB free" in report.words("space")
    assert "tmpfs" in report.words("mount")


@pytest.mark.any_machine
def test_a_mount_that_the_user_cannot_read_fails_three_checks_and_the_remedy_names_the_owner(
    site, run_checks, open_way, as_nobody
):
    site.workspace.root.chmod(0o711)
    site.workspace.manager_json.chmod(0o600)
    report = run_checks(prefix=as_nobody)
    assert report.failed == ["manager", "mount", "write"]
    assert "Permission denied for user 65534 of this container (a keeper ends with 113)" in report.words(
        "write"
    )
    assert f"run the container as user 0, who owns {site.workspace.trials} (drwxr-xr-x)" in report.words(
        "write"
    )
    assert "(a keeper ends with 106); let user 65534 of this container read the path" in report.words("mount")


# ---- manager.json


@pytest.mark.parametrize("content", ["", "{}", '{"experiment_id": "X", "version": "1", "addresses": []}'])
def test_an_invalid_manager_json_fails_the_manager_check(site, run_checks, content):
    site.workspace.manager_json.write_text(content)
    report = run_checks()
    assert report.failed == ["manager"]
    assert "nnictl resume" in report.words("manager")


def test_the_workspace_of_another_experiment_fails_the_manager_check(site, run_checks):
    report = run_checks(experiment_id="OTHEREXP")
    assert report.failed == ["manager"]
    assert f"belongs to experiment {EXPERIMENT}, but this job to OTHEREXP" in report.words("manager")


def test_a_manager_of_another_version_fails_the_version_check(site, run_checks):
    site.manager.version = "0.99.0"
    site.manager.write_document()
    report = run_checks()
    assert report.failed == ["version"]
    assert "`pip install .` in a checkout of trial-keeper 0.99.0" in report.words("version")
    assert run_checks(version_check=False).failed == []


# ---- the network


def test_a_refused_connection_fails_the_tcp_and_grpc_checks(site, run_checks):
    site.manager.die()
    report = run_checks()
    assert report.failed == ["grpc", "tcp"]
    assert "refuses connections: the machine responds" in report.words("tcp")
    assert "UNAVAILABLE" in report.words("grpc")


def test_a_listener_of_another_user_is_reported_and_does_not_receive_the_token(site, run_checks):
    give_away(int(site.manager.address.rpartition(":")[2]))
    report = run_checks()
    assert report.failed == ["grpc"]
    assert "another user of this machine" in report.words("grpc")
    assert site.manager.hellos == 0


def test_the_doctor_warns_if_one_of_several_addresses_is_unreachable(site, run_checks):
    site.manager.write_document("127.0.0.1:9", str(site.manager.address))
    report = run_checks()
    assert report.failed == []
    assert [report.outcomes(check) for check in ("tcp", "grpc")] == [["WARN", "OK"]] * 2


def test_a_host_name_that_cannot_be_resolved_fails_the_name_check(site, run_checks):
    site.manager.write_document("no-such-host.invalid:8081")
    report = run_checks()
    assert report.failed == ["grpc", "name", "tcp"]
    assert "cannot resolve no-such-host.invalid" in report.words("name")


@contextlib.contextmanager
def listener(answer=None):
    """Listen like a program that is no manager: send `answer` to every client, or nothing if `answer` is None."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    if answer is not None:
                        held[-1].sendall(answer)
                        held[-1].close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


@pytest.mark.parametrize(
    ("answer", "status"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "UNAVAILABLE"), (None, "DEADLINE_EXCEEDED")]
)
def test_the_grpc_check_fails_in_bounded_time_if_the_listener_is_not_a_manager(
    site, run_checks, answer, status
):
    with listener(answer) as address:
        site.manager.write_document(address)
        began_s = time.monotonic()
        report = run_checks()
        took_s = time.monotonic() - began_s
    assert report.failed == ["grpc"]
    assert report.outcomes("tcp") == ["OK"]
    assert status in report.words("grpc")
    assert took_s < scaled_s(15)


def test_the_connection_check_fails_in_bounded_time_if_packets_are_dropped(site, run_checks):
    # Fill the accept queue of the server. The kernel then drops the packets of further connection attempts.
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        while True:
            client = stack.enter_context(socket.socket())
            client.settimeout(0.2)
            try:
                client.connect(server.getsockname())
            except TimeoutError:
                break
        site.manager.write_document(f"127.0.0.1:{server.getsockname()[1]}")
        began_s = time.monotonic()
        report = run_checks()
        took_s = time.monotonic() - began_s
    assert report.failed == ["grpc", "tcp"]
    assert "does not respond within 4.5 s; open this port" in report.words("tcp")
    assert took_s < scaled_s(15)


# ---- refusals by the manager


def test_a_wrong_token_is_refused_and_not_shown(site, run_checks):
    report = run_checks(token="of-another-experiment")
    assert report.failed == ["grpc"]
    assert "the token is refused" in report.words("grpc")
    assert "`nnictl create` or `nnictl resume`" in report.words("grpc")
    assert "of-another-experiment" not in report.text


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (VersionRefused("cannot work with keeper 0.1; install 0.6"), "the version is refused"),
        (UnknownJob(), "the job is refused"),
    ],
    ids=["version", "job"],
)
def test_a_refused_version_or_job_is_reported_with_the_remedy_of_the_manager(
    site, run_checks, refusal, words
):
    site.manager.refuse_with = refusal
    report = run_checks()
    assert report.failed == ["grpc"]
    assert words in report.words("grpc")
    assert report.all_of("grpc")[0]["remedy"] == str(refusal).partition("; ")[2]


# ---- GPUs


@pytest.mark.parametrize("vendor", [NVIDIA, AMD])
def test_the_doctor_lists_visible_gpus(site, run_checks, tmp_path, vendor):
    site.environ |= build_driver(tmp_path, vendor)
    report = run_checks()
    assert report.outcomes("gpu") == ["OK"]
    assert report.words("gpu").startswith("2: Test GPU A, Test GPU B")


@pytest.mark.parametrize(
    ("vendor", "error"), [(NVIDIA, "Driver Not Loaded"), (AMD, "AMDSMI_STATUS_DRIVER_NOT_LOADED")]
)
def test_a_broken_gpu_driver_is_reported_with_its_error(site, run_checks, tmp_path, vendor, error):
    site.environ |= build_driver(tmp_path, vendor) | {"TEST_GPUS": "broken"}
    assert error in run_checks().words("gpu")


def test_the_gpu_check_reports_a_version_mismatch_between_the_amd_driver_and_its_python_binding(
    site, run_checks, tmp_path
):
    (tmp_path / "empty.c").touch()
    library = ["gcc", "-shared", "-o", tmp_path / "libamd_smi.so", tmp_path / "empty.c"]
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, to build a library without functions")
    subprocess.run(library, check=True, timeout=DEADLINE_S)
    site.environ["LD_LIBRARY_PATH"] = str(tmp_path)
    assert "amdsmi is not installed, or is of another version than ROCm" in run_checks().words("gpu")


# ---- the command line


def test_a_closed_stdout_ends_the_doctor_without_a_traceback(site):
    environ = site.environ | site.settings().to_environ()
    command = [sys.executable, "-m", "trial_keeper", "doctor"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as doctor:
        doctor.stdout.close()
        assert doctor.stderr.read() == b""
        assert doctor.wait(DEADLINE_S) == 1


def test_the_help_lists_the_doctor_command(site):
    done = run_doctor(site.environ, "--help")
    assert (done.returncode, "trial-keeper doctor [--json]" in done.stdout) == (0, True)


def test_an_unknown_option_is_refused(site):
    done = run_doctor(site.environ, "--yaml")
    assert (done.returncode, done.stdout) == (100, "")
    assert "cannot use 'doctor --yaml'" in done.stderr
