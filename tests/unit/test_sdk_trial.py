"""The SDK in a trial: parameters, reports, storage errors, and use outside of an experiment."""

import argparse
import enum
import errno
import json
import math
import os
import platform
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest
from deadlines import DEADLINE_S
from hypothesis import given
from hypothesis import strategies as st

import nni_sdk as nni
from nni_sdk.errors import (
    EnvironmentIncomplete,
    MetricInvalid,
    MetricNotWritten,
    MetricTooLong,
    ParameterMistyped,
    ParametersMissing,
    ParameterUnknown,
    SdkError,
)
from nni_sdk.frame import value_json
from nni_sdk.records import Record, decode
from nni_sdk.trial import TrialContext

PARAMETERS = {"lr": 0.1, "layer": {"_name": "conv", "size": 3}}


@pytest.fixture
def environ(tmp_path):
    content = {
        "parameter_id": 5,
        "parameter_source": "algorithm",
        "parameters": PARAMETERS,
        "parameter_index": 0,
    }
    (tmp_path / "parameter.cfg").write_text(json.dumps(content))
    return {
        "NNI_PLATFORM": "local",
        "NNI_EXP_ID": "eXpId",
        "NNI_TRIAL_JOB_ID": "tRiAl",
        "NNI_TRIAL_SEQ_ID": "12",
        "NNI_SYS_DIR": str(tmp_path),
        "NNI_OUTPUT_DIR": str(tmp_path / "output"),
    }


@pytest.fixture
def trial_of(monkeypatch):
    """Make this process a trial with the given environment."""

    def started(environ) -> TrialContext:
        context = TrialContext(environ)
        monkeypatch.setattr("nni_sdk.trial._trial", context)
        return context

    return started


@pytest.fixture
def trial(trial_of, environ):
    return trial_of(environ)


def records(trial: TrialContext) -> list[Record]:
    with open(trial.metrics_path, "rb") as file:
        decoded = decode(file.read(), 0)
    assert decoded.garbage == []
    return decoded.records


def run_python(code: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    outside = {k: v for k, v in os.environ.items() if not k.startswith("NNI_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=outside | environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


class Scalar:
    """Behaves like a one-element tensor of a framework without `tolist`."""

    def __init__(self, number: float) -> None:
        self.number = number

    def item(self) -> float:
        return self.number


class Meta:
    def tolist(self):
        raise NotImplementedError("a tensor without storage")


# ---- parameters


def test_the_first_process_that_reads_the_parameters_of_a_trial_reports_its_python_interpreter(
    trial, trial_of, environ, tmp_path
):
    path = tmp_path / ".nni/python.json"
    path.parent.mkdir(exist_ok=True)
    trial.parameter_file()
    report = json.loads(path.read_text())
    assert report == {"version": platform.python_version(), "path": sys.path}
    path.write_text("kept")
    trial_of(environ).parameter_file()
    assert path.read_text() == "kept"


def test_get_next_parameter_returns_the_parameters_only_once(trial):
    assert nni.get_current_parameter() is None
    assert nni.get_next_parameter() == PARAMETERS
    assert nni.get_next_parameter() is None


def test_current_parameters_stay_available_after_the_last_request(trial):
    nni.get_next_parameter()
    nni.get_next_parameter()
    assert nni.get_current_parameter() == PARAMETERS
    assert nni.get_current_parameter("lr") == 0.1


def test_an_unknown_parameter_name_raises_a_key_error(trial):
    nni.get_next_parameter()
    with pytest.raises(KeyError, match="dropout"):
        nni.get_current_parameter("dropout")


def test_experiment_id_and_trial_id_and_sequence_id_come_from_environment_variables(trial):
    assert (nni.get_experiment_id(), nni.get_trial_id(), nni.get_sequence_id()) == ("eXpId", "tRiAl", 12)


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[]", b'{"parameters": {}}', b"[" * 100_000])
def test_the_error_for_a_missing_or_damaged_parameter_file_contains_the_path_of_the_file(
    trial_of, environ, tmp_path, content
):
    path = tmp_path / "parameter.cfg"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    trial_of(environ)
    with pytest.raises(ParametersMissing, match=f"^cannot .*{path}.*; "):
        nni.get_next_parameter()
    trial_of(environ)
    with pytest.raises(ParametersMissing, match=f"^cannot .*{path}.*; "):
        nni.report_final_result(1)


@pytest.mark.parametrize("name", ["NNI_SYS_DIR", "NNI_TRIAL_JOB_ID"])
def test_the_error_for_a_missing_environment_variable_contains_the_name_of_the_variable(
    trial_of, environ, name
):
    del environ[name]
    trial_of(environ)
    with pytest.raises(EnvironmentIncomplete, match=f"^cannot .*{name} is not; .*unset NNI_PLATFORM"):
        nni.report_final_result(1)


def test_a_sequence_id_that_is_not_a_number_raises_an_error(trial_of, environ):
    trial_of(environ | {"NNI_TRIAL_SEQ_ID": "first"})
    with pytest.raises(EnvironmentIncomplete, match=r"^cannot use NNI_TRIAL_SEQ_ID='first'"):
        nni.get_sequence_id()


# ---- reports


def test_reports_are_written_as_records_in_order(trial):
    nni.get_next_parameter()
    for value in (0.5, 1, {"default": 0.25, "loss": math.nan}):
        nni.report_intermediate_result(value)
    nni.report_final_result(0.75)
    written = [(r.parameter_id, r.trial_job_id, r.type, r.sequence, r.value) for r in records(trial)]
    assert written == [
        (5, "tRiAl", "PERIODICAL", 0, "0.5"),
        (5, "tRiAl", "PERIODICAL", 1, "1"),
        (5, "tRiAl", "PERIODICAL", 2, '{"default": 0.25, "loss": NaN}'),
        (5, "tRiAl", "FINAL", 0, "0.75"),
    ]


def test_a_result_can_be_reported_before_get_next_parameter_is_called(trial):
    nni.report_final_result(0.5)
    assert records(trial)[0].parameter_id == 5
    assert nni.get_next_parameter() == PARAMETERS


def test_a_reported_result_is_in_the_file_when_the_report_function_returns(trial):
    for count in range(1, 20):
        nni.report_intermediate_result(count)
        assert len(records(trial)) == count


def test_a_new_process_appends_its_reports_to_the_existing_file(trial_of, environ):
    for value in (1, 2):
        trial_of(environ)
        nni.report_intermediate_result(value)
    assert [r.value for r in records(TrialContext(environ))] == ["1", "2"]


def test_a_process_can_still_report_results_after_it_has_cleared_its_environment(trial, environ):
    nni.get_next_parameter()
    environ.clear()
    nni.report_final_result(0.5)
    assert [each.value for each in records(trial)] == ["0.5"]
    assert (nni.get_trial_id(), nni.should_stop()) == ("tRiAl", False)


def test_the_metrics_file_is_created_by_the_first_report(trial, tmp_path):
    nni.get_next_parameter()
    assert os.listdir(tmp_path) == ["parameter.cfg"]


def test_reports_of_several_threads_have_distinct_sequence_numbers(trial):
    def report():
        for _ in range(200):
            nni.report_intermediate_result(0.5)

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(r.sequence for r in records(trial)) == list(range(800))


def test_the_metrics_descriptor_is_not_inherited_by_child_programs(trial):
    nni.report_intermediate_result(1)
    held = [fd for fd in os.listdir("/proc/self/fd") if _path_of(fd) == trial.metrics_path]
    assert len(held) == 1
    assert not os.get_inheritable(int(held[0]))


def _path_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # The listing of the folder used this descriptor and has closed it.
        return ""


@pytest.mark.parametrize(("limit", "opens"), [(1024, True), (100, False)])
def test_the_metrics_file_is_opened_again_if_the_training_code_closed_its_descriptor(
    environ, tmp_path, limit, opens
):
    code = (
        "import os, resource, sys, nni_sdk as nni\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        "nni.get_next_parameter()\n"
        "nni.report_intermediate_result(1)\n"
        f"os.closerange(3, {limit})\n"
        f"file = open({str(tmp_path / 'own')!r}, 'w') if {opens} else None\n"
        "nni.report_intermediate_result(2)\n"
        "nni.report_final_result(3)\n"
    )
    result = run_python(code, environ)
    assert (result.returncode, result.stderr) == (0, "")
    assert [r.value for r in records(TrialContext(environ))] == ["1", "2", "3"]
    assert not opens or (tmp_path / "own").read_text() == ""


ASKED = "import nni_sdk as nni; nni.get_next_parameter(); "


def test_all_final_results_are_written_and_only_the_second_result_causes_a_warning(environ):
    result = run_python(ASKED + "[nni.report_final_result(n) for n in (1, 2, 3)]", environ)
    assert result.returncode == 0
    assert result.stderr.count("cannot replace the final result by ") == 1
    assert "by 2: the manager counts the first" in result.stderr
    assert [(r.type, r.value) for r in records(TrialContext(environ))] == [
        ("FINAL", "1"),
        ("FINAL", "2"),
        ("FINAL", "3"),
    ]


def test_a_final_result_causes_a_hint_if_the_code_has_not_requested_parameters(environ):
    result = run_python("import nni_sdk as nni; nni.report_final_result(1)", environ)
    assert result.stderr.count("nothing has asked for them; call nni.get_next_parameter()") == 1
    assert [r.value for r in records(TrialContext(environ))] == ["1"]
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import nni_sdk; nni_sdk.report_final_result(2)'])"
    for code in (ASKED + "nni.report_final_result(1)", ASKED + child):
        assert run_python(code, environ).stderr == ""


def test_an_invalid_metric_raises_an_error_and_uses_no_sequence_number(trial):
    for bad in ({1, 2}, {"a": object()}, b"bytes"):
        with pytest.raises(MetricInvalid):
            nni.report_intermediate_result(bad)
    nni.report_intermediate_result(1)
    assert [r.sequence for r in records(trial)] == [0]


def test_a_metric_over_the_size_limit_raises_an_error_and_is_not_written(trial):
    nni.report_intermediate_result(1)
    with pytest.raises(MetricTooLong, match=r"^cannot report a metric of"):
        nni.report_intermediate_result(list(range(300_000)))
    assert len(records(trial)) == 1


# ---- storage errors


def test_the_error_for_a_metrics_file_that_cannot_be_opened_contains_the_cause(trial_of, environ, tmp_path):
    (tmp_path / ".nni").write_text("a file where the folder should be")
    trial_of(environ)
    with pytest.raises(
        MetricNotWritten, match=rf"^cannot append a metric to {tmp_path}/\.nni/metrics: Not a directory; "
    ) as e:
        nni.report_final_result(1)
    assert e.value.errno == errno.ENOTDIR
    assert isinstance(e.value.__cause__, OSError)


def test_the_error_for_a_report_that_does_not_fit_on_the_disk_contains_the_cause(trial_of, environ, tmp_path):
    (tmp_path / ".nni").mkdir()
    (tmp_path / ".nni" / "metrics").symlink_to("/dev/full")
    trial_of(environ)
    with pytest.raises(
        MetricNotWritten, match=r"^cannot append a metric to .*: No space left on device; .*free space"
    ) as e:
        nni.report_final_result(1)
    assert e.value.errno == errno.ENOSPC


def test_a_partially_written_record_does_not_damage_later_records(environ):
    # The limit on the file size leaves room for half of the second record. So the kernel really writes only a part of this
    # record.
    code = (
        "import os, resource, signal, nni_sdk as nni\n"
        "from nni_sdk.errors import MetricNotWritten\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "nni.report_intermediate_result(1)\n"
        "size = os.path.getsize(os.environ['NNI_SYS_DIR'] + '/.nni/metrics')\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 2, hard))\n"
        "try:\n"
        "    nni.report_intermediate_result(2)\n"
        "except MetricNotWritten as error:\n"
        "    print(error)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "nni.report_intermediate_result(3)\n"
    )
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.skip("this system limits file sizes already")
    result = run_python(code, environ)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("cannot append a metric to ")
    with open(TrialContext(environ).metrics_path, "rb") as file:
        data = file.read()
    decoded = decode(data, 0)
    assert [r.value for r in decoded.records] == ["1", "3"]
    assert sum(span.length for span in decoded.garbage) == decoded.records[0].size // 2
    assert decoded.consumed == len(data)


# ---- values


class Colour(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float64(0.5), "0.5"),
        (np.float64("nan"), "NaN"),
        (-np.float64("inf"), "-Infinity"),
        (np.float32(0.1), repr(float(np.float32(0.1)))),
        (np.float16(0.5), "0.5"),
        (np.int64(-3), "-3"),
        (np.bool_(True), "true"),
        (np.array(0.5), "0.5"),
        (np.array([1.0, np.nan]), "[1.0, NaN]"),
        (np.arange(4).reshape(2, 2), "[[0, 1], [2, 3]]"),
        (
            {"default": np.float32(0.5), "curve": (np.int8(1), [np.array([2])])},
            '{"default": 0.5, "curve": [1, [[2]]]}',
        ),
        (Scalar(0.25), "0.25"),
        ([Scalar(1)], "[1]"),
        ({1: "a", 2.5: "b", None: "d", "e": "f"}, '{"1": "a", "2.5": "b", "null": "d", "e": "f"}'),
        ({np.float64(0.5): 1}, '{"0.5": 1}'),
        (Colour.RED, "3"),
        (10**400, "1" + "0" * 400),
        (None, "null"),
        ("text", '"text"'),
    ],
)
def test_numpy_and_other_values_are_encoded_as_plain_json(value, text):
    assert value_json(value) == text


@given(st.floats() | st.integers())
def test_a_number_has_the_same_encoding_as_in_the_json_module(number):
    assert value_json(number) == json.dumps(number)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({1, 2}, "value is a set"),
        ({"curve": [1, 2, 3, {4}]}, r"value\[.curve.\]\[3\] is a set"),
        ({"a": {"b": (0, 1j)}}, r"value\[.a.\]\[.b.\]\[1\] is a complex"),
        ({(1, 2): 3}, r"a key of value is a tuple: \(1, 2\)"),
        ({"a": {np.int64(1): 3}}, r"a key of value\['a'\] is a numpy.int64"),
        (b"bytes", "value is a bytes"),
        (np.array([{1}, 2], dtype=object), r"value\[0\] is a set"),
        (np.complex128(1j), "value is a complex"),
        (np.longdouble(1), "value is a numpy.longdouble"),
        (np.float64, "value is a type"),
        (Meta(), "value is a .*test_sdk_trial.Meta"),
    ],
)
def test_the_error_for_a_value_that_json_cannot_represent_contains_the_path_of_the_value(value, place):
    with pytest.raises(
        MetricInvalid, match=f"^cannot report this metric: {place}.*; use only numbers"
    ) as error:
        value_json(value)
    assert isinstance(error.value, TypeError)
    assert isinstance(error.value, SdkError)


def test_an_int_with_too_many_digits_is_refused():
    with pytest.raises(MetricInvalid, match=r"value\[0\] is an int with more digits"):
        value_json([10**5000])
    with pytest.raises(MetricInvalid, match="value is an int with more digits"):
        value_json(10**5000)


def test_a_value_that_contains_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(MetricInvalid, match="contains itself or is nested too deeply"):
        value_json(loop)


# ---- outside an experiment


@pytest.mark.parametrize("platform", [{}, {"NNI_PLATFORM": "standalone"}, {"NNI_PLATFORM": "unittest"}])
def test_results_outside_an_experiment_are_printed_and_not_written_to_files(platform, tmp_path):
    code = (
        "import nni_sdk as nni\n"
        "print(nni.get_current_parameter(), nni.get_next_parameter(), nni.get_current_parameter(), nni.get_next_parameter())\n"
        "print(nni.get_experiment_id(), nni.get_trial_id(), nni.get_sequence_id())\n"
        "nni.report_intermediate_result(0.5)\n"
        "nni.report_intermediate_result({'default': 0.25})\n"
        "nni.report_final_result(0.75)\n"
    )
    result = run_python(f"import os; os.chdir({str(tmp_path)!r})\n{code}", platform)
    assert result.returncode == 0
    assert result.stdout == "None {} {} {}\nSTANDALONE STANDALONE 0\n"
    assert "WARNING (nni_sdk) Running outside an experiment" in result.stderr
    shown = [line.split("(nni_sdk) ")[1] for line in result.stderr.splitlines() if " INFO " in line]
    assert shown == [
        "Intermediate result: 0.5  (Index 0)",
        'Intermediate result: {"default": 0.25}  (Index 1)',
        "Final result: 0.75",
    ]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("report", ["report_intermediate_result", "report_final_result"])
def test_a_metric_over_the_size_limit_is_also_refused_outside_an_experiment(report):
    result = run_python(f"import nni_sdk as nni; nni.{report}('x' * 999_999)", {})
    assert result.stderr.splitlines()[-1].startswith(
        "nni_sdk.errors.MetricTooLong: cannot report a metric of "
    )
    assert len(result.stderr) < 10_000
    assert run_python(f"import nni_sdk as nni; nni.{report}('x' * 999_000)", {}).returncode == 0


def test_results_outside_an_experiment_are_printed_with_any_logging_configuration():
    code = (
        "import logging; logging.basicConfig(level=logging.CRITICAL)\n"
        "import nni_sdk as nni; nni.report_final_result(1)\n"
    )
    assert run_python(code, {}).stderr.count("Final result: 1") == 1


def test_an_invalid_metric_is_also_refused_outside_an_experiment():
    assert (
        "MetricInvalid: cannot report this metric"
        in run_python("import nni_sdk as nni; nni.report_final_result({1})", {}).stderr
    )


# ---- names that NNI scripts use


def test_the_function_merge_parameter_changes_a_namespace_in_place():
    base = argparse.Namespace(lr=0.1, seed=None, name="a")
    assert nni.utils.merge_parameter(base, {"lr": 0.5, "seed": 3}) is base
    assert vars(base) == {"lr": 0.5, "seed": 3, "name": "a"}


def test_the_function_merge_parameter_changes_a_dict_in_place():
    base = {"lr": 0.1}
    assert nni.utils.merge_parameter(base, {"lr": 0.5}) is base
    assert base == {"lr": 0.5}


def test_the_function_merge_parameter_without_parameters_leaves_the_base_unchanged():
    assert nni.utils.merge_parameter({"lr": 0.1}, None) == {"lr": 0.1}


@pytest.mark.parametrize(
    ("override", "kind", "message"),
    [
        ({"lr": 0.5, "dropout": 1}, ParameterUnknown, "^cannot override 'dropout': .*only .'lr', 'n'"),
        ({"lr": 0.5, "n": 1.0}, ParameterMistyped, "^cannot override 'n', a int, with 1.0, a float; "),
        ({"n": True}, ParameterMistyped, "^cannot override 'n', a int, with True, a bool; "),
    ],
)
def test_the_function_merge_parameter_changes_nothing_if_one_value_is_invalid(override, kind, message):
    for base in ({"lr": 0.1, "n": 3}, argparse.Namespace(lr=0.1, n=3)):
        with pytest.raises(kind, match=message):
            nni.utils.merge_parameter(base, override)
        assert (base if isinstance(base, dict) else vars(base)) == {"lr": 0.1, "n": 3}


def test_the_function_split_index_keeps_only_the_options_of_choices():
    indexed = {
        "net": {"_index": 1, "_value": {"_name": "conv", "size": {"_index": 0, "_value": 3}}},
        "lr": 0.1,
    }
    assert nni.utils.split_index(indexed) == {"net": {"_name": "conv", "size": 3}, "lr": 0.1}


def test_the_function_convert_dict2tuple_makes_parameters_hashable():
    parameters = {"net": {"size": 3, "_name": "conv"}, "lr": 0.1}
    expected = (("lr", 0.1), ("net", (("_name", "conv"), ("size", 3))))
    assert nni.utils.convert_dict2tuple(parameters) == expected
    assert parameters["net"] == {"size": 3, "_name": "conv"}


def test_the_keys_of_search_spaces_have_the_names_of_nni():
    node = nni.utils.NodeType
    assert (node.ROOT, node.TYPE, node.VALUE, node.INDEX, node.NAME) == (
        "root",
        "_type",
        "_value",
        "_index",
        "_name",
    )


def test_the_function_merge_parameter_raises_value_error_and_type_error_as_in_nni():
    assert issubclass(ParameterUnknown, ValueError)
    assert issubclass(ParameterMistyped, TypeError)


def test_a_script_for_nni_runs_if_only_its_import_line_is_changed(environ):
    script = (
        "import argparse, logging\n"
        "import nni_sdk as nni\n"
        "from nni_sdk.utils import merge_parameter\n"
        "logger = logging.getLogger('mnist_AutoML')\n"
        "def main(args):\n"
        "    for epoch in range(args['epochs']):\n"
        "        nni.report_intermediate_result(epoch / 10)\n"
        "    nni.report_final_result({'default': 0.9, 'lr': args['lr']})\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', type=float, default=0.01)\n"
        "parser.add_argument('--epochs', type=int, default=3)\n"
        "parser.add_argument('--layer', default=None)\n"
        "tuner_params = nni.get_next_parameter()\n"
        "logger.debug(tuner_params)\n"
        "main(vars(merge_parameter(parser.parse_args(), tuner_params)))\n"
    )
    result = run_python(script, environ)
    assert (result.returncode, result.stderr) == (0, "")
    assert [r.value for r in records(TrialContext(environ))] == [
        "0.0",
        "0.1",
        "0.2",
        '{"default": 0.9, "lr": 0.1}',
    ]


def test_an_unknown_attribute_of_the_sdk_module_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'chance'"):
        nni.chance  # noqa: B018


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            "{'acc': 0.9}",
            "cannot use the result {\"acc\": 0.9}: it has no number under 'default', so the tuner ignores it; ",
        ),
        ("{'default': None}", "it has no number under 'default'"),
        ("{'loss': 1}", "under 'default', or name the metric in the experiment file under objectives"),
        ("'0.93'", 'cannot use the result "0.93": it is no number'),
        ("float('nan')", "cannot use the result NaN: it is no number"),
        ("[1, 2]", "cannot use the result [1, 2]: it is no number"),
        ("10 ** 400", "it is no number"),
        ("None", "under 'default'; a function without `return` returns None"),
        ("list(range(100))", "...: it is no number"),
        (
            "{'default': 1, 'other': eval('[' * 50 + '0' + ']' * 50), 'more': [eval('[' * 99 + '0' + ']' * 99)]}",
            "it is nested more than 100 levels deep, so the tuner ignores it; report a flatter value",
        ),
    ],
)
def test_results_without_a_usable_number_cause_a_single_warning(environ, metric, said):
    code = (
        ASKED
        + f"[nni.report_intermediate_result({metric}) for _ in range(3)]; nni.report_final_result({metric})"
    )
    result = run_python(code, environ)
    assert (result.returncode, result.stderr.count("cannot use the result")) == (0, 1)
    assert said in result.stderr
    assert len(records(TrialContext(environ))) == 4


@pytest.mark.parametrize(
    "metric",
    ["1", "0.5", "{'default': 1, 'loss': None}", "-10 ** 9", "True", "__import__('numpy').bool_(False)"],
)
def test_a_usable_result_causes_no_warning(environ, metric):
    code = ASKED + f"nni.report_intermediate_result({metric}); nni.report_final_result({metric})"
    assert run_python(code, environ).stderr == ""


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("{'acc': 0.9, 'default': 1}", "it has no number under 'ms', so the trial has no result; "),
        ("0.9", "cannot use the result 0.9: it has no number under 'acc', 'ms'"),
        ("{'acc': '1', 'ms': float('nan')}", "no number under 'acc', 'ms'"),
        ("{'acc': 0.9, 'ms': 2}", ""),
    ],
)
def test_a_final_result_causes_a_warning_unless_it_has_a_number_for_each_objective(environ, metric, said):
    code = ASKED + f"nni.report_intermediate_result({{'loss': 1}}); nni.report_final_result({metric})"
    result = run_python(code, environ | {"NNI_RESULT_METRICS": '["acc", "ms"]'})
    assert (result.returncode, result.stderr.count("cannot use the result")) == (0, bool(said))
    assert said in result.stderr


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            "0.5",
            "cannot assess the intermediate result 0.5: it has no number under 'acc' or 'ms'; if the experiment",
        ),
        ("{'loss': 1}", "report a dict with this number"),
        ("{'ms': 2}", ""),
    ],
)
def test_an_intermediate_result_without_a_number_of_any_objective_causes_a_single_warning(
    environ, metric, said
):
    final = "nni.report_final_result({'acc': 0.9})"
    code = ASKED + f"[nni.report_intermediate_result({metric}) for _ in range(3)]; {final}"
    result = run_python(code, environ | {"NNI_RESULT_METRICS": '["acc", "ms"]'})
    assert (result.returncode, result.stderr.count("cannot assess")) == (0, bool(said))
    assert said in result.stderr
    assert "it has no number under 'ms', so the trial has no result" in result.stderr
