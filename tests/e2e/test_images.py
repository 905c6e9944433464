"""The images, built and run: the keeper as PID 1 of a container, and the manager in a container."""

import json
import os
import signal

import psutil
import pytest
from deadlines import DEADLINE_S
from fake_manager import KEY, TOKEN
from guarded_server import Guarded
from real_containers import REPOSITORY
from real_experiment import wait_until

from nni_manager.store.reader import StoreReader
from nni_sdk.records import decode
from trial_keeper import __version__
from trial_keeper.wire.messages import Stream, TrialEnded, TrialStarted
from trial_keeper.wire.reasons import ExitReason

pytestmark = [pytest.mark.smoke, pytest.mark.any_machine, pytest.mark.containers, pytest.mark.timeout(1000)]

MOUNT = "/mnt/confignfs-data"
NOBODY = 65534

REPORTING = """
import sys
import nni_sdk as nni
nni.get_next_parameter()
for i in range(300):
    nni.report_intermediate_result(i)
nni.report_final_result(300)
print("to stdout")
print("to stderr", file=sys.stderr)
sys.exit(3)
"""
# This trial reports a result after it has received SIGTERM.
REPORTS_AFTER_SIGTERM = """
import signal, sys
import nni_sdk as nni
nni.get_next_parameter()
def stop(*_):
    nni.report_final_result("last words")
    sys.exit(5)
signal.signal(signal.SIGTERM, stop)
nni.report_intermediate_result("ready")
while True:
    signal.pause()
"""
# The daemon forks twice, starts a session and closes all inherited files, so that nothing links it to the trial.
DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 256)
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    os._exit(0)
os.wait()
"""
IGNORES_SIGTERM = "trap '' TERM; touch deaf; while true; do sleep 1000; done"
GREEDY = """
import nni_sdk as nni
nni.get_next_parameter()
nni.report_intermediate_result("hungry")
open("gate").close()
hoard = []
while True:
    hoard.append(b"x" * 1_000_000)
"""
TRAIN = """
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
for i in range(3):
    nni.report_intermediate_result(x * i)
nni.report_final_result(x)
"""


@pytest.fixture
def a_keeper(podman, site, a_container):
    """Runs the keeper's image for a trial with this command, as a cluster would."""

    def start(command, *options, train="", user=0, arguments=(), **settings):
        (site.code / "train.py").write_text(train)
        site.add_trial(command, code_dir=f"{MOUNT}/code")
        storage = site.workspace.root.parent
        for path in (storage, *storage.rglob("*")):
            os.chown(path, user, user)
        workspace = f"{MOUNT}/{site.workspace.root.name}"
        environ = site.settings(workspace=workspace, **settings).to_environ()
        variables = [f"--env={name}={value}" for name, value in environ.items()]
        container = (f"--volume={storage}:{MOUNT}", f"--user={user}:{user}", *variables, *options)
        return a_container(*container, podman.image("keeper"), *arguments)

    return start


# ---- the keeper's image


def test_a_container_exits_with_the_exit_code_of_its_trial(site, a_keeper):
    keeper = a_keeper("python3 train.py", train=REPORTING, collect_logs=True, relay_output=True)
    assert keeper.wait() == 3
    assert [record.value for record in decode(site.file(), 0).records] == [str(i) for i in range(301)]
    for stream in Stream:
        assert site.manager.stored(stream) == site.file(stream), stream
    (ended,) = site.manager.all_of(TrialEnded)
    assert ended == site.exit()
    assert (ended.reason, ended.exit_code) == (ExitReason.NONZERO_EXIT, 3)
    assert keeper.stdout == "to stdout\n"
    assert "to stderr\n" in keeper.stderr
    assert TOKEN not in keeper.stderr


def test_the_keeper_is_pid_1_of_its_container(site, a_keeper):
    keeper = a_keeper("echo $PPID; tr '\\0' ' ' < /proc/1/cmdline")
    assert keeper.wait() == 0
    parent, command = site.file(Stream.STDOUT).decode().splitlines()
    assert parent == "1"
    assert command.split() == ["/opt/trial-keeper/bin/python", "-I", "/opt/trial-keeper/bin/trial-keeper"]


def test_training_code_can_import_nni_sdk_but_none_of_the_keepers_libraries(site, a_keeper):
    find = "import importlib.util as u; print(*(n for n in {!r} if u.find_spec(n)))"
    names = ["nni_sdk", "trial_keeper", "nni_manager", "grpc", "google", "psutil", "packaging"]
    keeper = a_keeper("python3 train.py", train=find.format(names))
    assert keeper.wait() == 0
    assert site.file(Stream.STDOUT) == b"nni_sdk\n"


def test_the_users_python_path_does_not_affect_the_keepers_imports(site, a_keeper):
    for name in ("grpc", "psutil", "google", "asyncio"):
        (site.code / f"{name}.py").write_text("raise RuntimeError('the user has another one')")
    keeper = a_keeper("python3 -c 'import grpc'", f"--env=PYTHONPATH={MOUNT}/code")
    assert keeper.wait() == 1
    (ended,) = site.manager.all_of(TrialEnded)
    assert "the user has another one" in ended.message


def test_the_keeper_runs_as_any_user_on_a_read_only_root_filesystem(site, a_keeper):
    keeper = a_keeper("id -u; exec python3 train.py", "--read-only", train=REPORTING, user=NOBODY)
    assert keeper.wait() == 3, keeper.stderr
    assert site.file(Stream.STDOUT) == b"65534\nto stdout\n"
    assert site.manager.stored() == site.file()


def test_the_manager_receives_metrics_reported_after_the_stop_signal_of_the_container(site, a_keeper):
    keeper = a_keeper("exec python3 train.py", train=REPORTS_AFTER_SIGTERM)
    site.manager.wait_for_bytes(b"ready")
    keeper.stop(grace_s=30)
    assert keeper.wait() == 5
    (ended,) = site.manager.all_of(TrialEnded)
    assert ended == site.exit()
    assert (ended.reason, ended.exit_code) == (ExitReason.JOB_LOST, 5)
    assert b"last words" in site.manager.stored()


def test_a_trial_that_ignores_sigterm_is_killed_before_the_containers_grace_period_ends(site, a_keeper):
    keeper = a_keeper(IGNORES_SIGTERM, grace_s=1.0)
    wait_until((site.code / "deaf").exists, "the trial ignores SIGTERM")
    keeper.stop(grace_s=30)
    assert keeper.wait() == 128 + signal.SIGKILL
    (ended,) = site.manager.all_of(TrialEnded)
    assert ended == site.exit()
    assert ended.reason is ExitReason.JOB_LOST


def test_the_argument_grace_s_of_a_keeper_container_overrides_the_grace_period_of_the_settings(
    site, a_keeper
):
    keeper = a_keeper(IGNORES_SIGTERM, arguments=("--grace-s", "0.5"), grace_s=1000.0)
    wait_until((site.code / "deaf").exists, "the trial ignores SIGTERM")
    keeper.stop(grace_s=30)
    assert keeper.wait() == 128 + signal.SIGKILL
    assert site.exit().reason is ExitReason.JOB_LOST


def test_a_second_signal_to_a_container_ends_the_grace_period(site, a_keeper):
    keeper = a_keeper(IGNORES_SIGTERM, grace_s=1000.0)
    wait_until((site.code / "deaf").exists, "the trial ignores SIGTERM")
    keeper.signal("TERM")
    wait_until(lambda: b"stopping" in site.file(Stream.KEEPER), "the first signal is logged")
    keeper.signal("INT")
    assert keeper.wait() == 128 + signal.SIGKILL
    assert site.exit().reason is ExitReason.JOB_LOST


@pytest.mark.parametrize(
    "command",
    [
        "python3 train.py; exit 4",
        "for i in {1..500}; do (true & true) & done; exit 4",
        "(setsid bash -c 'while :; do echo on and on; done' &); exit 4",
        "(trap '' TERM HUP INT; setsid sleep 1000) & kill -STOP $!; exit 4",
    ],
    ids=["a daemon", "500 orphans", "a job that writes on", "a job that is deaf and stopped"],
)
def test_all_processes_of_a_trial_have_exited_when_the_keeper_reports_the_end_of_the_trial(
    site, a_keeper, command
):
    site.manager.closes = False
    keeper = a_keeper(command, train=DAEMON, collect_logs=True)
    ended = site.manager.wait_for_message(TrialEnded)
    assert psutil.Process(keeper.pid).children(recursive=True) == []
    assert ended.final_sizes[Stream.STDOUT] == len(site.file(Stream.STDOUT))
    site.manager.closes = True
    site.manager.commit_again()
    assert keeper.wait() == 4
    assert site.manager.all_of(TrialEnded) == [site.exit()] == [ended]
    assert ended.reason is ExitReason.NONZERO_EXIT


def test_orphans_are_reaped_while_the_trial_runs_and_killed_when_the_trial_ends(site, a_keeper):
    site.gate("gate")
    orphans = "for i in {1..50}; do (true & true) & done; wait"
    keeper = a_keeper(f"{orphans}; setsid sleep 1000 & (sleep 1000 &) ; read _ < gate || exit 4")
    site.manager.wait_for(lambda: site.manager.all_of(TrialStarted), "TrialStarted")
    first = psutil.Process(keeper.pid)

    def names():
        return sorted(process.name() for process in first.children(recursive=True))

    wait_until(lambda: names() == ["bash", "sleep", "sleep"], "the trial and its two orphans are left")
    processes = [first, *first.children(recursive=True)]
    site.open_gate("gate")
    assert keeper.wait() == 4
    assert psutil.wait_procs(processes, timeout=DEADLINE_S)[1] == []
    assert site.manager.all_of(TrialEnded) == [site.exit()]


def test_the_keeper_reports_an_oom_kill_of_its_trial(site, a_keeper):
    site.gate("gate")
    keeper = a_keeper("exec python3 train.py", "--memory=96m", "--memory-swap=96m", train=GREEDY)
    # The trial fills the memory only after the keeper has connected and needs no further memory. The memory of a killed trial is
    # not free immediately: a keeper that needs memory at that moment would be killed as well.
    site.manager.wait_for_bytes(b"hungry")
    site.open_gate("gate")
    assert keeper.wait() == 128 + signal.SIGKILL
    (ended,) = site.manager.all_of(TrialEnded)
    assert ended == site.exit()
    assert (ended.reason, ended.exit_code) == (ExitReason.OUT_OF_MEMORY, 128 + signal.SIGKILL)
    assert ended.message.startswith("the container's memory limit of 96 MiB was reached")
    assert b"hungry" in site.manager.store.records[KEY][0].value.encode()


def test_the_error_names_the_missing_variables_if_a_keeper_container_has_no_settings(podman, a_container):
    keeper = a_container(podman.image("keeper"))
    assert keeper.wait() == 100
    assert "TRIAL_KEEPER_WORKSPACE is not set" in keeper.stderr
    assert keeper.stderr.count("\n") == 1


def test_the_image_build_names_a_remedy_if_the_python_of_the_base_image_does_not_match(podman):
    build = str(REPOSITORY / "images" / "build.sh")
    with pytest.raises(AssertionError, match=r"cannot make wheels for .*; set PYTHON"):
        podman.run(build, "keeper", "localhost/trial-keeper-test-none", podman.base(), PYTHON="echo")


def test_the_bill_of_materials_names_every_package_of_the_image(podman, a_container):
    installed = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    python = "/opt/trial-keeper/bin/python"
    listing = a_container("--entrypoint", python, podman.image("keeper"), "-I", "-c", installed)
    assert listing.wait() == 0, listing.stderr
    bill = a_container("--entrypoint", "cat", podman.image("keeper"), "/opt/trial-keeper/sbom.cdx.json")
    assert bill.wait() == 0, bill.stderr
    content = json.loads(bill.stdout)
    assert content["bomFormat"] == "CycloneDX"
    assert {part["name"]: part["version"] for part in content["components"]} == json.loads(listing.stdout)


def test_an_image_label_has_the_digest_of_the_base_image(podman):
    label = '{{index .Labels "org.opencontainers.image.base.name"}}'
    base = podman.run("podman", "image", "inspect", "--format", label, podman.image("keeper")).strip()
    digest = podman.run("podman", "image", "inspect", "--format", "{{.Digest}}", podman.base()).strip()
    assert base.endswith(f"@{digest}")


def test_a_container_on_the_host_network_cannot_use_the_managers_api_without_the_token(podman, a_container):
    """The container runs as the manager's user and shares the loopback interface of the machine. Nevertheless, the manager
    requires the token.
    """
    request = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1])"
    server = Guarded(require_token=False)
    try:
        container = a_container(
            *("--network", "host", "--entrypoint", "python3", podman.image("keeper"), "-c", request),
            f"http://127.0.0.1:{server.port}/",
        )
        assert (container.wait(), server.done) == (1, 0)
        assert "HTTP Error 401" in container.stderr
        assert server.ask(token=None).status_code == 200
    finally:
        server.close()


# ---- the manager's image


def test_the_managers_image_runs_nnictl(podman, a_container):
    nnictl = a_container(podman.image("manager"), "--version")
    assert nnictl.wait() == 0
    assert nnictl.stdout == f"nnictl {__version__}\n"


def test_the_managers_image_contains_the_kubernetes_client(podman, a_container):
    python = a_container(
        *("--entrypoint", "/opt/trial-keeper/bin/python", podman.image("manager"), "-c"),
        "from nni_manager.training_services.kubernetes.login import log_in; log_in()",
    )
    assert python.wait() == 1
    assert "cannot log in to Kubernetes: file /root/.kube/config does not exist; " in python.stderr


def test_the_managers_image_runs_a_local_experiment_to_its_end(podman, a_container, tmp_path):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "search_space.json").write_text(json.dumps({"x": {"_type": "uniform", "_value": [1, 2]}}))
    config = {
        "authorName": "tests",
        "experimentName": "tests",
        "trialConcurrency": 2,
        "maxTrialNum": 2,
        "trainingServicePlatform": "local",
        "searchSpacePath": "search_space.json",
        "logDir": "experiments",
        "tuner": {"builtinTunerName": "TPE"},
        "trial": {"command": "python3 train.py", "codeDir": "."},
    }
    (folder / "config.yml").write_text(json.dumps(config))  # JSON is valid YAML
    options = (f"--volume={folder}:/experiment", "--workdir=/experiment", "--network=none")
    nnictl = a_container(
        *options, podman.image("manager"), "create", "--config", "config.yml", "--foreground"
    )
    assert nnictl.wait() == 0, nnictl.stdout + nnictl.stderr
    (database,) = folder.glob("experiments/*/db/experiment.sqlite")
    with StoreReader(database) as reader:
        rows = reader.metrics()
    finals = [json.loads(row.value) for row in rows if row.is_final]
    assert len(finals) == 2
    assert all(1 <= value <= 2 for value in finals)
    assert len(rows) == 8
