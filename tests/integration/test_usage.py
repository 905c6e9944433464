"""Resource usage of trials: a real keeper reports it, and a real manager stores and shows it."""

import sys

import pytest
from fake_manager import KEY
from gpu_drivers import AMD, NVIDIA, build_driver
from real_experiment import wait_until

from trial_keeper.wire.messages import GpuUsage, Usage

MIB = 2**20
# The trial keeps one core busy until the gate opens. It holds 100 MB: one half itself, the other half in a child process.
GREEDY = """
import os, signal, subprocess, sys, threading
with open(os.environ["NNI_OUTPUT_DIR"] + "/model", "wb") as file:
    file.write(os.urandom(5_000_000))
held = b"x" * 50_000_000
child = subprocess.Popen([sys.executable, "-c", "held = b'x' * 50_000_000; input()"], stdin=subprocess.PIPE)
opened = threading.Event()
def wait():
    open("gate").read()
    opened.set()
threading.Thread(target=wait).start()
while not opened.is_set():
    sum(range(1000))
child.communicate(b"\\n")
"""


def usage_of(site, train='open("gate").read()', least_rss_bytes=0, **options):
    """The first reported usage with at least this much memory. The trial runs until the gate opens."""
    site.gate("gate")
    site.add_python_trial(train, **options)
    keeper = site.start_keeper()
    usage = site.manager.wait_for(
        lambda: next(
            (seen for seen in site.manager.all_of(Usage) if seen.rss_bytes >= least_rss_bytes), None
        ),
        "the trial is measured",
    )
    site.open_gate("gate")
    assert keeper.wait() == 0
    return usage


def test_a_keeper_reports_memory_cpu_and_disk_usage_of_the_trial_process_tree(site):
    # In the first sample, the child may be missing. So the test takes the first sample with the memory of both processes.
    usage = usage_of(site, GREEDY, 100 * MIB)
    assert usage.key == KEY
    assert 100 * MIB < usage.rss_bytes < 400 * MIB
    assert 10 < usage.cpu_percent < 150, "about one core must be reported"
    assert 5_000_000 <= usage.disk_bytes < 6_000_000
    assert usage.gpus == ()


@pytest.mark.any_machine
@pytest.mark.parametrize("vendor", [NVIDIA, AMD])
def test_a_keeper_reports_utilisation_and_memory_of_each_gpu(site, tmp_path, vendor):
    site.environ |= build_driver(tmp_path, vendor)
    assert usage_of(site).gpus == (GpuUsage(0, 40.0, 1024 * MIB), GpuUsage(1, 80.0, 2048 * MIB))


@pytest.mark.parametrize(("indices", "seen"), [((1,), [1]), ((), [])])
def test_only_gpus_assigned_to_the_trial_are_reported(site, tmp_path, indices, seen):
    site.environ |= build_driver(tmp_path)
    assert [gpu.index for gpu in usage_of(site, gpu_indices=indices).gpus] == seen


@pytest.mark.parametrize("vendor", [NVIDIA, AMD])
@pytest.mark.parametrize(("gpus", "seen"), [("broken", []), ("999:0 80:2048", [1])])
def test_gpus_with_implausible_or_missing_values_are_omitted(site, tmp_path, gpus, seen, vendor):
    site.environ |= build_driver(tmp_path, vendor) | {"TEST_GPUS": gpus}
    assert [gpu.index for gpu in usage_of(site).gpus] == seen


def test_the_reported_cpu_time_includes_processes_that_ended_between_two_samples(site):
    site.gate("gate")
    # The trial runs many short processes one after the other, each shorter than the interval between two samples.
    site.add_trial(f"while ! [ -e done ]; do {sys.executable} -c 'sum(range(3_000_000))'; done")
    keeper = site.start_keeper()
    usage = site.manager.wait_for_message(Usage)
    (site.code / "done").touch()
    assert keeper.wait() == 0
    assert usage.cpu_percent > 10


def test_a_keeper_reports_no_usage_after_a_reconnect_or_the_end_of_the_trial(site):
    site.gate("gate")
    site.add_trial("read -r < gate || true")
    keeper = site.start_keeper()
    site.manager.wait_for_message(Usage)
    site.manager.die()
    site.manager.start()
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert isinstance(site.manager.messages[-1], Usage) is False
    assert "Traceback" not in keeper.stderr


def test_the_manager_stores_the_peak_usage_and_shows_the_usage_after_a_resume(a_real_experiment):
    train = (
        "import time\nimport nni_sdk as nni\nnni.get_next_parameter()\nheld = b'x' * 60_000_000\n"
        "end = time.monotonic() + 2\n"
        "while time.monotonic() < end:\n    sum(range(1000))\n"
        "nni.report_final_result(1)\n"
    )
    experiment = a_real_experiment(train, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    trial = wait_until(
        lambda: (seen := experiment.get("/trials")) and seen[0]["usage"] and seen[0], "usage is shown"
    )
    assert set(trial["usage"]) == {"peak", "latest"}
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert trial["usage"]["latest"] is None
    peak = trial["usage"]["peak"]
    assert peak["rssBytes"] > 60_000_000
    assert peak["cpuPercent"] > 10
    assert peak["diskBytes"] > 0
    assert peak["gpus"] == []
    samples = experiment.get(f"/trials/{trial['id']}/usage")
    assert max(sample["rssBytes"] for sample in samples) == peak["rssBytes"]
    assert {(sample["task"], sample["attempt"]) for sample in samples} == {("main-0", 0)}
    assert all(trial["startTime"] <= sample["timestamp"] <= trial["endTime"] + 1000 for sample in samples)
    experiment.kill_manager()
    experiment.start()
    assert experiment.get("/trials")[0]["usage"] == trial["usage"]
