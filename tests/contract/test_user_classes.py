"""User tuners and assessors: they are called as in NNI, and their errors do not affect the manager process."""

import json
import signal
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest
from deadlines import DEADLINE_S
from real_experiment import wait_until

from nni_manager.config.model import UserClass
from nni_manager.config.prior_results import PriorResult
from nni_manager.domain.metrics import MetricValue
from nni_manager.errors import InternalError
from nni_manager.tuner import user_process
from nni_manager.tuner.assessment import Assessment, PastLearningCurve
from nni_manager.tuner.base import Later, Observation, PastTrial
from nni_manager.tuner.user_classes import UserAssessor, UserTuner
from nni_manager.tuner.user_process import UserCodeFailed

SPACE = {"x": {"_type": "uniform", "_value": [0, 1]}}
# These classes are written for NNI: they do not use names of trial-keeper.
PROPOSES = """
from nni.tuner import Tuner
from nni.utils import OptimizeMode, extract_scalar_reward
import nni

class Mine(Tuner):
    def __init__(self, optimize_mode="maximize", most=99):
        self.mode = OptimizeMode(optimize_mode)
        self.most = most
        self.heard = []
    def update_search_space(self, search_space):
        self.heard.append(["space", search_space])
    def generate_parameters(self, parameter_id, **kwargs):
        if parameter_id >= self.most:
            raise nni.NoMoreTrialError("no more")
        return {"x": parameter_id, "heard": list(self.heard), "mode": self.mode.value}
    def receive_trial_result(self, parameter_id, parameters, value, **kwargs):
        self.heard.append(["result", parameter_id, parameters["x"], value, kwargs, extract_scalar_reward(value)])
    def trial_end(self, parameter_id, success, **kwargs):
        self.heard.append(["end", parameter_id, success, kwargs])
    def load_checkpoint(self):
        self.heard.append("checkpoint")
    def import_data(self, data):
        self.heard.append(["data", data])
"""


@pytest.fixture
def a_tuner(tmp_path):
    """A factory of tuners of the class Mine in this file. The fixture closes the tuners."""
    made = []

    def make(code=PROPOSES, *, timeout_s=60.0, validator=None, **class_args):
        (tmp_path / "mine.py").write_text(textwrap.dedent(code))
        (tmp_path / "log").mkdir(exist_ok=True)
        of = UserClass("mine.Mine", str(tmp_path), validator, timeout_s)
        made.append(UserTuner(of, class_args, SPACE, tmp_path / "log"))
        return made[-1]

    yield make
    for tuner in made:
        tuner.close()


def process_of(tuner):
    return psutil.Process(tuner._process._process.pid)


def test_a_user_tuner_receives_the_same_calls_as_in_nni(a_tuner):
    tuner = a_tuner(optimize_mode="minimize")
    first = tuner.ask(0)
    assert first.parameters == {"x": 0, "heard": [["space", SPACE]], "mode": "minimize"}
    assert first.metadata == {"parameter_id": 0}
    tuner.ask(1)
    tuner.ask(2)
    tuner.tell_result(0, Observation("Abc12", 0.5, '{"default": 0.5, "loss": [1, NaN]}', True))
    tuner.tell_result(0, Observation("Abc12", 0.9, "0.9", True))
    tuner.tell_result(1, Observation("Def34", None, None, False))
    heard = tuner.ask(3).parameters["heard"][1:]
    value = heard[0].pop(3)
    assert value["default"] == 0.5
    assert value["loss"][1] != value["loss"][1], "NaN must be passed as it was reported"
    assert heard == [
        ["result", 0, 0, {"trial_job_id": "Abc12", "customized": False}, 0.5],
        ["end", 0, True, {"trial_job_id": "Abc12"}],
        ["end", 1, False, {"trial_job_id": "Def34"}],
    ]


def test_a_restored_user_tuner_receives_its_history_and_can_still_delay_parameters(a_tuner):
    tuner = a_tuner(most=3)
    asked = [tuner.ask(key) for key in range(3)]
    assert tuner.ask(3) is Later.LATER
    tuner.tell(0, 0.5)
    past = [
        PastTrial(
            key,
            each.parameters,
            each.metadata,
            0.5 if key == 0 else None,
            key == 0,
            f"t{key}",
            "0.5" if key == 0 else None,
            key == 0,
        )
        for key, each in enumerate(asked)
    ]
    rebuilt = a_tuner(most=5)
    rebuilt.restore(reversed(past))
    heard = rebuilt.ask(4).parameters
    assert (heard["x"], rebuilt.ask(5).parameters["x"]) == (3, 4), "no id may be used twice"
    assert [each if isinstance(each, str) else each[0] for each in heard["heard"]] == [
        "checkpoint", "space", "result", "end",
    ]  # fmt: skip
    rebuilt.tell(1, 0.25)
    with pytest.raises(InternalError, match="a second time"):
        rebuilt.ask(0)
    with pytest.raises(InternalError, match="did not propose"):
        rebuilt.tell(9, 0.5)
    with pytest.raises(InternalError, match="in use"):
        rebuilt.restore([])
    with pytest.raises(InternalError, match="is not of this search space"):
        a_tuner().restore([PastTrial(0, {}, {}, None, ended=False)])


def test_a_restored_user_tuner_receives_its_history_in_the_original_order(a_tuner):
    code = """
    from nni.tuner import Tuner
    class Mine(Tuner):
        def update_search_space(self, search_space):
            self.seen = []
        def generate_parameters(self, parameter_id, **kwargs):
            self.seen.append(parameter_id)
            return {"seen": list(self.seen)}
        def receive_trial_result(self, parameter_id, parameters, value, **kwargs):
            self.seen.append(-parameter_id)
    """
    tuner = a_tuner(code)
    past = [PastTrial(key, {}, {"parameter_id": 9 - key}, 1.0, True, "t", "1.0", True) for key in range(8)]
    tuner.restore(past)
    seen = tuner.ask(8).parameters["seen"]
    assert seen == [*(sign * number for number in range(2, 10) for sign in (1, -1)), 10]


def test_a_user_tuner_receives_imported_results_in_the_format_of_nni(a_tuner):
    tuner = a_tuner()
    assert tuner.import_results([PriorResult({"x": 0.5}, 1.0, '{"default": 1.0, "n": 2}')]) == 1
    assert tuner.ask(0).parameters["heard"][1] == [
        "data", [{"parameter": {"x": 0.5}, "value": {"default": 1.0, "n": 2}}],
    ]  # fmt: skip


GIVES_LATER = """
from nni.tuner import Tuner
import nni

class Mine(Tuner):
    def update_search_space(self, search_space):
        self.owed = []
    def generate_multiple_parameters(self, parameter_id_list, **kwargs):
        self.give = kwargs["st_callback"]
        return super().generate_multiple_parameters(parameter_id_list, **kwargs)
    def generate_parameters(self, parameter_id, **kwargs):
        if parameter_id % 2:
            self.owed.append(parameter_id)
            raise nni.NoMoreTrialError
        return {"n": parameter_id}
    def receive_trial_result(self, parameter_id, parameters, value, **kwargs):
        for each in self.owed:
            self.give(each, {"n": 100 * value + each})
        self.owed = []
"""


def test_the_next_request_returns_the_parameters_that_a_user_tuner_sent_late(a_tuner):
    tuner = a_tuner(GIVES_LATER)
    assert tuner.ask(0).parameters == {"n": 0}
    assert tuner.ask(1) is Later.LATER
    tuner.tell(0, 2)
    later = tuner.ask(1)
    assert (later.parameters, later.metadata) == ({"n": 201}, {"parameter_id": 1})


def test_numpy_values_of_a_user_tuner_are_converted_to_plain_numbers(a_tuner):
    code = """
    import numpy as np
    from nni.tuner import Tuner
    class Mine(Tuner):
        def update_search_space(self, search_space): pass
        def generate_parameters(self, parameter_id, **kwargs):
            return {"x": np.float64(0.5), "n": np.int64(3), "v": np.arange(2), "nan": float("nan")}
    """
    parameters = a_tuner(code).ask(0).parameters
    assert {**parameters, "nan": None} == {"x": 0.5, "n": 3, "v": [0, 1], "nan": None}


def failing(body, at="generate_parameters(self, parameter_id, **kwargs)"):
    return f"""
import os, signal, subprocess, sys, time
from nni.tuner import Tuner
class Mine(Tuner):
    def update_search_space(self, search_space): pass
    def {at}:
        {body}
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (failing("raise ValueError('my mistake')"), r"(?s)raised in 'generate_parameters'.*in generate_parameters.*my mistake"),
        (failing("sys.exit(3)"), "(?s)raised in 'generate_parameters'.*SystemExit: 3"),
        (failing("print('last words', file=sys.stderr); os._exit(4)"), "(?s)ended with exit code 4.*last words"),
        (failing("os.kill(os.getpid(), signal.SIGSEGV)"), "was killed by signal 11"),
        (failing("return [1]"), r"\[1\] is not a dict; return a dict of names and values"),
        (failing("import json; return {'x': json.loads('[' * 100 + ']' * 100)}"), "is nested more than 100 levels deep; return"),
        (failing("return {'x': object()}"), "cannot encode <object.*as JSON.*convert it"),
        (failing("return {'x': 'a' * 2**25}"), "its answer has more than 16777216 bytes"),
        (
            failing("return None", "generate_multiple_parameters(self, parameter_id_list, **kwargs)"),
            "generate_multiple_parameters returned None; return a list with parameters, or an empty list",
        ),
        (
            # This tuner writes bytes to the connection of its process, so the manager receives an invalid answer.
            failing("os.write(int(sys.argv[1]), b'5\\n')"),
            "its answer to 'generate_parameters' is not valid JSON",
        ),
        (failing("pass", "__init__(self, needed)"), "(?s)raised in '__init__'.*needed"),
        ("syntax error", "(?s)raised in '__init__'.*SyntaxError"),
        ("import no_such_module_of_mine", "No module named 'no_such_module_of_mine'"),
        ("x = 1", "has no attribute 'Mine'"),
    ],
)  # fmt: skip
def test_an_error_in_a_user_tuner_is_reported_with_its_cause(a_tuner, code, message):
    with pytest.raises(UserCodeFailed, match=message) as raised:
        a_tuner(code).ask(0)
    assert str(raised.value).startswith("cannot ")


def test_each_call_after_a_failed_init_of_a_user_tuner_reports_the_error_of_init(a_tuner):
    tuner = a_tuner(failing("raise ValueError('my mistake')", "__init__(self)"))
    for _ in range(2):
        with pytest.raises(UserCodeFailed, match=r"(?s)raised in '__init__'.*my mistake"):
            tuner.ask(0)


def test_a_hanging_user_tuner_is_killed_with_its_child_processes_after_the_timeout(a_tuner, tmp_path):
    body = "print(subprocess.Popen(['sleep', '999']).pid, flush=True); time.sleep(999)"
    tuner = a_tuner(failing(body), timeout_s=3.0)
    with pytest.raises(
        UserCodeFailed,
        match=r"'generate_parameters' has not returned within 3 s; make it faster, or increase tuner\.callTimeout",
    ):
        tuner.ask(0)
    child = int((tmp_path / "log" / "tuner.log").read_text())
    wait_until(
        lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie",
        "its child has ended",
    )
    with pytest.raises(UserCodeFailed, match="has not returned within"):
        tuner.ask(1)


def test_a_stopping_manager_does_not_wait_for_a_hanging_user_tuner(a_tuner):
    tuner = a_tuner(failing("print('here', flush=True); time.sleep(999)"))
    raised = []

    def ask():
        try:
            tuner.ask(0)
        except UserCodeFailed as error:
            raised.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: bytes(tuner._process._tail) == b"here\n", "the tuner hangs")
    tuner.close()
    thread.join(DEADLINE_S)
    assert "the manager is stopping" in raised[0]
    with pytest.raises(UserCodeFailed):
        tuner.ask(1)


def test_invalid_trial_ids_in_a_forged_response_of_a_user_tuner_are_ignored(a_tuner):
    forged = json.dumps(["ok", [0, {"x": 2}], [1], {}, 7, None, "aB3dE"])
    tuner = a_tuner(failing(f"os.write(int(sys.argv[1]), {forged!r}.encode() + b'\\n'); return {{'x': 1}}"))
    assert tuner.ask(0).parameters == {"x": 2}
    assert tuner.take_stops() == ["aB3dE"]


def test_the_stored_output_of_a_user_tuner_is_bounded(a_tuner, tmp_path, monkeypatch):
    monkeypatch.setattr(user_process, "MAX_PRINTED_BYTES", 100_000)
    tuner = a_tuner(failing("print('a' * 3_000_000); os.write(1, b'e' * 10); return {'x': 1}"))
    assert tuner.ask(0).parameters == tuner.ask(1).parameters == {"x": 1}
    tuner.close()
    log = (tmp_path / "log" / "tuner.log").read_bytes()
    assert log.startswith(b"aaa")
    assert log.endswith(b"further output is discarded\n")
    assert len(log) < 101_000


def test_a_user_tuner_has_a_higher_oom_score_than_the_manager(a_tuner):
    tuner = a_tuner(
        failing("return {'score': int(subprocess.check_output(['cat', '/proc/self/oom_score_adj']))}")
    )
    assert tuner.ask(0).parameters["score"] == 250


def test_a_user_tuner_is_killed_when_its_manager_exits(a_tuner, tmp_path):
    is_asked = tmp_path / "is-asked"
    tuner = a_tuner(failing(f"open({str(is_asked)!r}, 'w').close(); time.sleep(999)"))

    def ask():
        with pytest.raises(UserCodeFailed):
            tuner.ask(0)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(is_asked.exists, "its code runs")
    process = process_of(tuner)
    # This simulates the manager's exit: when a process exits, the kernel shuts down its connections in the same way.
    tuner._process._connection.shutdown(2)
    assert tuner._process._process.wait(DEADLINE_S) == -signal.SIGKILL
    asking.join(DEADLINE_S)
    assert not process.is_running()


def test_child_processes_of_a_user_tuner_do_not_inherit_its_connection(a_tuner):
    listing = "subprocess.run(['ls', '/proc/self/fd'], capture_output=True, text=True, close_fds=False)"
    tuner = a_tuner(failing(f"return {{'fds': {listing}.stdout.split()}}"))
    assert len(tuner.ask(0).parameters["fds"]) == 4, (
        "only stdin, stdout, stderr and the listed folder may be open"
    )


def test_a_fork_of_a_user_tuner_can_neither_respond_nor_hide_the_exit_of_the_tuner(a_tuner):
    body = """
        self.n = getattr(self, "n", 0) + 1
        if self.n < 3 and os.fork() == 0:
            return {"n": "of a child"}
        if self.n == 3:
            if os.fork() == 0:
                time.sleep(999)
            os._exit(3)
        os.wait()
        return {"n": self.n}
    """
    tuner = a_tuner(failing(body))
    assert [tuner.ask(key).parameters["n"] for key in range(2)] == [1, 2]
    with pytest.raises(UserCodeFailed, match="its process ended with exit code 3"):
        tuner.ask(2)


def test_closing_a_user_tuner_also_kills_its_child_processes_in_separate_sessions(a_tuner):
    tuner = a_tuner(failing("return {'pid': subprocess.Popen(['sleep', '999'], start_new_session=True).pid}"))
    child = psutil.Process(tuner.ask(0).parameters["pid"])
    tuner.close()
    wait_until(lambda: not child.is_running() or child.status() == "zombie", "its child has ended")


def test_no_signal_is_sent_when_a_user_tuner_is_closed_after_its_exit(a_tuner, monkeypatch):
    tuner = a_tuner(failing("os._exit(0)"))
    with pytest.raises(UserCodeFailed):
        tuner.ask(0)
    # The tuner has exited, so its pid may already belong to another process. close() must not send a signal to this pid.
    monkeypatch.setattr(
        user_process.os, "killpg", lambda *_: pytest.fail("a signal was sent to a reused pid")
    )
    tuner.close()


def test_a_user_tuner_that_blocks_all_threads_is_killed_when_its_manager_exits(tmp_path):
    (tmp_path / "mine.py").write_text(
        failing("import re; print(os.getpid(), flush=True); re.match('(a+)+$', 'a' * 99 + 'b')")
    )
    manager = f"""if True:
        from pathlib import Path
        from nni_manager.config.model import UserClass
        from nni_manager.tuner.user_classes import UserTuner
        folder = Path({str(tmp_path)!r})
        (folder / "log").mkdir()
        UserTuner(UserClass("mine.Mine", str(folder), None, 60.0), {{}}, {{}}, folder / "log").ask(0)
    """
    printed = tmp_path / "log/tuner.log"
    with subprocess.Popen([sys.executable, "-c", manager]) as process:
        wait_until(lambda: printed.exists() and printed.read_text().endswith("\n"), "the tuner hangs")
        worker = psutil.Process(int(printed.read_text()))
        process.kill()
    wait_until(lambda: not worker.is_running() or worker.status() == "zombie", "the tuner has ended")


def test_a_user_tuner_returns_parameters_after_closing_its_stdout(a_tuner):
    assert a_tuner(failing("sys.stdout = None; return {'x': 1}")).ask(0).parameters == {"x": 1}


def test_a_user_tuner_still_proposes_parameters_after_a_result_without_a_number_was_refused(a_tuner):
    tuner = a_tuner()
    tuner.ask(0)
    with pytest.raises(UserCodeFailed, match="cannot find a number in the result"):
        tuner.tell_result(0, Observation("t", None, '{"accuracy": 1}', True))
    assert tuner.ask(1).parameters["x"] == 1


def test_an_installed_nni_package_takes_precedence_over_nni_sdk(a_tuner, tmp_path):
    (tmp_path / "nni").mkdir()
    (tmp_path / "nni" / "__init__.py").write_text("class NoMoreTrialError(Exception): pass\n")
    (tmp_path / "nni" / "tuner.py").write_text("class Tuner:\n    real = True\n")
    code = """
    import nni
    from nni.tuner import Tuner
    class Mine(Tuner):
        def update_search_space(self, search_space): pass
        def generate_multiple_parameters(self, ids, **kwargs):
            return [{"real": self.real, "ids": ids}] if ids[0] == 0 else []
    """
    tuner = a_tuner(code)
    assert tuner.ask(0).parameters == {"real": True, "ids": [0]}
    assert tuner.ask(1) is Later.LATER


def test_a_class_args_validator_runs_before_the_user_class_is_instantiated(a_tuner, tmp_path):
    (tmp_path / "checks.py").write_text(
        "from nni import ClassArgsValidator\n"
        "class V(ClassArgsValidator):\n"
        "    def validate_class_args(self, **kwargs):\n"
        "        assert kwargs == {'most': 1}, 'most must be 1'\n"
    )
    assert a_tuner(validator="checks.V", most=1).ask(0).parameters["x"] == 0
    with pytest.raises(UserCodeFailed, match="most must be 1"):
        a_tuner(validator="checks.V", most=2).ask(0)


def test_a_class_args_validator_can_use_conditions_of_the_schema_library(a_tuner, tmp_path):
    (tmp_path / "checks.py").write_text(
        "import schema\n"
        "from nni.utils import ClassArgsValidator\n"
        "class V(ClassArgsValidator):\n"
        "    def validate_class_args(self, **kwargs):\n"
        "        schema.Schema({\n"
        "            'most': self.range('most', int, 1, 3),\n"
        "            schema.Optional('how'): self.choices('how', 'fast', 'slow'),\n"
        "            schema.Optional('file'): self.path('file'),\n"
        "        }).validate(kwargs)\n"
    )
    for most in (1, 3):
        assert a_tuner(validator="checks.V", most=most).ask(0).parameters["x"] == 0
    for wrong, message in (
        ({"most": 4}, "most must be of type int, from 1 to 3"),
        ({"most": 1.5}, "most must be of type int, from 1 to 3"),
        ({"most": 1, "how": "soon"}, r"how must be one of \['fast', 'slow'\]"),
        ({"most": 1, "file": "/nowhere"}, "file must be an existing path"),
    ):
        with pytest.raises(UserCodeFailed, match=message):
            a_tuner(validator="checks.V", **wrong).ask(0)


ASSESSES = """
from nni.assessor import Assessor, AssessResult
class Mine(Assessor):
    def __init__(self, least=0.5):
        self.least, self.ended = least, {}
    def assess_trial(self, trial_job_id, trial_history):
        print(trial_job_id, trial_history, self.ended, flush=True)
        last = trial_history[-1]
        last = last["acc"] if isinstance(last, dict) else last
        return AssessResult.Good if last >= self.least else AssessResult.Bad
    def trial_end(self, trial_job_id, success):
        self.ended[trial_job_id] = success
"""


@pytest.fixture
def an_assessor(tmp_path):
    made = []

    def make(code=ASSESSES, **class_args):
        (tmp_path / "mine.py").write_text(textwrap.dedent(code))
        made.append(UserAssessor(UserClass("mine.Mine", str(tmp_path), None, 60.0), class_args, tmp_path))
        return Assessment(made[-1])

    yield make
    for assessor in made:
        assessor.close()


def test_a_user_assessor_receives_results_unchanged(an_assessor, tmp_path):
    assessment = an_assessor()
    assert assessment.report("Abc12", 0, [0.75])
    assert assessment.report("Abc12", 0, [MetricValue('{"acc": 0.9}')])
    assert not assessment.report("Abc12", 0, [0.25])
    assessment.end("Abc12", has_succeeded=False)
    assessment.restore([PastLearningCurve("Old11", 0, [1.0], True)])
    assert assessment.report("Def34", 0, [1])
    assessment.close()
    assert (tmp_path / "assessor.log").read_text().splitlines()[1:] == [
        "Abc12 [0.75, {'acc': 0.9}] {}",
        "Abc12 [0.75, {'acc': 0.9}, 0.25] {}",
        "Def34 [1] {'Abc12': False, 'Old11': True}",
    ]


def test_an_exception_in_a_user_assessor_is_reported_with_its_traceback(an_assessor):
    code = ASSESSES.replace("last = trial_history[-1]", "raise KeyError('mine')")
    with pytest.raises(
        UserCodeFailed,
        match=r"(?s)assessor mine\.Mine: an exception was raised in 'assess_trial'.*KeyError: 'mine'",
    ):
        an_assessor(code).report("a", 0, [1.0])


@pytest.mark.parametrize("answer", ["None", "'Bad'", "1", "[True]"])
def test_a_user_assessor_that_returns_neither_an_assess_result_nor_a_bool_causes_an_error(
    an_assessor, answer
):
    code = ASSESSES.replace("last = trial_history[-1]", f"return {answer}")
    with pytest.raises(
        UserCodeFailed, match=r"(?s)in 'assess_trial'.*is no answer; return AssessResult\.Good or"
    ):
        an_assessor(code).report("a", 0, [1.0])


@pytest.mark.parametrize(
    ("answer", "is_good"), [("True", True), ("np.float64(1) > 2", False), ("AssessResult.Bad", False)]
)
def test_a_user_assessor_may_return_a_bool_of_python_or_numpy(an_assessor, answer, is_good):
    code = ASSESSES.replace("last = trial_history[-1]", f"import numpy as np; return {answer}")
    assert an_assessor(code).report("a", 0, [1.0]) is is_good


def test_nni_sdk_exports_the_tuner_and_assessor_names_of_nni():
    import nni_sdk

    assert nni_sdk.tuner.NoMoreTrialError is nni_sdk.NoMoreTrialError
    assert nni_sdk.utils.extract_scalar_reward({"default": 2, "x": 1}) == 2
    assert nni_sdk.utils.extract_scalar_history([1, {"default": 2}]) == [1, 2]
    assert nni_sdk.assessor.AssessResult.Good.value is True
    for method in ("generate_parameters", "update_search_space"):
        with pytest.raises(NotImplementedError, match=method):
            getattr(nni_sdk.tuner.Tuner(), method)(0)
    with pytest.raises(RuntimeError, match="cannot find a number in the result 'a'; report a float"):
        nni_sdk.utils.extract_scalar_reward("a")
