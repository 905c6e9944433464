import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from deadlines import DEADLINE_S, scaled_s

import nni_sdk
from nni_sdk.records import Record, decode

SDK_PARENT = Path(nni_sdk.__file__).parents[1]


@pytest.fixture
def environ(tmp_path):
    (tmp_path / "parameter.cfg").write_text(json.dumps({"parameter_id": 0, "parameters": {}}))
    outside = {k: v for k, v in os.environ.items() if not k.startswith("NNI_")}
    return outside | {
        "NNI_PLATFORM": "local",
        "NNI_EXP_ID": "eXpId",
        "NNI_TRIAL_JOB_ID": "tRiAl",
        "NNI_TRIAL_SEQ_ID": "0",
        "NNI_SYS_DIR": str(tmp_path),
        "PYTHONPATH": str(SDK_PARENT),
    }


def records(environ: dict[str, str]) -> list[Record]:
    data = Path(environ["NNI_SYS_DIR"], ".nni", "metrics").read_bytes()
    decoded = decode(data, 0)
    assert (decoded.garbage, decoded.consumed) == ([], len(data))
    return decoded.records


def test_all_reports_are_stored_if_sigkill_follows_the_last_report(environ):
    code = (
        "import os, signal, nni_sdk as nni\n"
        "nni.get_next_parameter()\n"
        "for i in range(500): nni.report_intermediate_result(i / 7)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env=environ, timeout=DEADLINE_S).returncode
        == -signal.SIGKILL
    )
    assert [(r.sequence, float(r.value)) for r in records(environ)] == [(i, i / 7) for i in range(500)]


MANY = """
import multiprocessing, os, threading
import nni_sdk as nni

def report(who):
    for i in range(200):
        nni.report_intermediate_result({"default": i, "who": who, "padding": "x" * (i * 20)})

if __name__ == "__main__":
    nni.report_intermediate_result({"default": 0, "who": "before"})
    forked = []
    for n in range(2):
        pid = os.fork()
        if pid == 0:
            report(f"fork {n}")
            os._exit(0)
        forked.append(pid)
    spawn = multiprocessing.get_context("spawn")
    spawned = [spawn.Process(target=report, args=(f"spawn {n}",)) for n in range(2)]
    threads = [threading.Thread(target=report, args=(f"thread {n}",)) for n in range(2)]
    for each in spawned + threads:
        each.start()
    for each in spawned + threads:
        each.join()
    assert [p.exitcode for p in spawned] == [0, 0]
    assert [os.waitpid(pid, 0)[1] for pid in forked] == [0, 0]
"""


def test_concurrent_reports_of_processes_and_threads_are_intact_and_in_order(environ, tmp_path):
    script = tmp_path / "many.py"
    script.write_text(MANY)
    subprocess.run([sys.executable, str(script)], env=environ, timeout=scaled_s(120), check=True)
    values = [json.loads(r.value) for r in records(environ)]
    assert Counter(v["who"] for v in values) == {"before": 1} | {
        f"{kind} {n}": 200 for kind in ("fork", "spawn", "thread") for n in range(2)
    }
    for kind in ("fork", "spawn", "thread"):
        # Records of one process or thread are in order. Records of different processes or threads may alternate.
        for n in range(2):
            assert [v["default"] for v in values if v["who"] == f"{kind} {n}"] == list(range(200))


def test_the_reports_of_parent_and_child_have_separate_sequence_numbers_after_a_fork(environ):
    code = (
        "import os, nni_sdk as nni\n"
        "nni.report_intermediate_result(0)\n"
        "pid = os.fork()\n"
        "nni.report_intermediate_result(pid == 0)\n"
        "if pid: os.waitpid(pid, 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=environ, timeout=DEADLINE_S, check=True)
    assert sorted((r.sequence, r.value) for r in records(environ)) == [(0, "0"), (1, "false"), (1, "true")]


def modules_loaded_by(code: str, environ: dict[str, str]) -> set[str]:
    """The modules that `code` loads in a new interpreter."""
    program = "import os, sys; before = set(sys.modules)\n" + code + "\nprint(*set(sys.modules) - before)"
    # -S disables .pth files. They could import modules before `code`, and the test would not count these modules.
    result = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return set(result.stdout.split())


def test_importing_nni_sdk_loads_only_modules_of_the_sdk_and_itertools(environ):
    assert modules_loaded_by("import nni_sdk", environ) <= {
        "nni_sdk",
        "nni_sdk.errors",
        "nni_sdk.frame",
        "nni_sdk.trial",
        "itertools",
    }


def test_a_trial_imports_json_but_no_slow_module_when_it_reports_results(environ):
    loaded = modules_loaded_by(
        "import nni_sdk as nni; nni.get_next_parameter(); nni.report_intermediate_result(0.5); "
        "nni.report_final_result({'default': 1})",
        environ,
    )
    assert "json" in loaded
    heavy = {
        "logging",
        "socket",
        "threading",
        "typing",
        "dataclasses",
        "inspect",
        "subprocess",
        "grpc",
        "numpy",
        "nni_sdk.records",
    }
    assert loaded & heavy == set()
    assert len(records(environ)) == 2


def test_a_report_of_a_number_imports_no_module_that_is_written_in_python(environ):
    loaded = modules_loaded_by(
        "import nni_sdk as nni; nni.get_next_parameter(); before |= set(sys.modules); nni.report_intermediate_result(0.5)",
        environ,
    )
    assert loaded <= {"fcntl"}


CONTINUED = """
import multiprocessing
from nni_sdk.integrations.continued_training import ContinuedTraining
from nni_sdk.integrations.reporter import MetricReporter

def report(training):
    training.continue_in_this_process()
    training._reporter.report({"loss": 1})

if __name__ == "__main__":
    training = ContinuedTraining(MetricReporter("loss"), is_saved=True)
    if training.model is None:
        training.round_ended(lambda path: open(path, "w").close())
    else:
        multiprocessing.get_context("spawn").Process(target=report, args=(training,)).start()
"""


def test_a_spawned_process_continues_from_the_checkpoint_of_its_parent(environ, tmp_path):
    (tmp_path / "train.py").write_text(CONTINUED)
    for _ in range(2):
        subprocess.run([sys.executable, tmp_path / "train.py"], env=environ, timeout=DEADLINE_S, check=True)
    decoded = decode((tmp_path / ".nni/metrics").read_bytes(), 0)
    # The spawned process repeats the results that precede the checkpoint. Without the second mark, these results would count
    # twice.
    assert [(each.checkpoint, each.attempt_id is None) for each in decoded.marks] == [
        ("000001", True),
        ("000001", False),
    ]
    assert decoded.marks[1].offset < decoded.records[0].offset


def test_a_forked_child_that_exits_does_not_report_the_final_results_of_its_parent(environ):
    code = """
import os, sys, nni_sdk
from nni_sdk.integrations.reporter import MetricReporter

def reporter(value):
    made = MetricReporter("loss")
    made.report_final_result_at_exit()
    made.report({"loss": value})
    return made

nni_sdk.get_next_parameter()
own = reporter(1)
for trains in False, True:
    if os.fork() == 0:
        if trains:
            reporter(3)
        sys.exit(0)
    os.wait()
own.report({"loss": 2})
"""
    subprocess.run([sys.executable, "-c", code], env=environ, timeout=DEADLINE_S, check=True)
    assert [r.value for r in records(environ) if r.type == "FINAL"] == ["3.0", "2.0"]


def test_several_final_results_at_the_exit_are_reported_in_the_order_of_their_trainings(environ):
    code = """
import nni_sdk
from nni_sdk.integrations.reporter import MetricReporter

nni_sdk.get_next_parameter()
for value in 1, 2:
    reporter = MetricReporter("loss")
    reporter.report_final_result_at_exit()
    reporter.report({"loss": value})
"""
    subprocess.run([sys.executable, "-c", code], env=environ, timeout=DEADLINE_S, check=True)
    assert [r.value for r in records(environ) if r.type == "FINAL"] == ["1.0", "2.0"]


def test_a_forked_child_that_exits_does_not_remove_the_checkpoints_of_its_parent():
    code = """
import os, sys, nni_sdk
print(nni_sdk.save_checkpoint(lambda folder: None))
if os.fork() == 0:
    sys.exit(0)
os.wait()
assert nni_sdk.load_checkpoint()
"""
    outside = {k: v for k, v in os.environ.items() if not k.startswith("NNI_")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=outside | {"PYTHONPATH": str(SDK_PARENT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert not os.path.exists(result.stdout.splitlines()[0])
