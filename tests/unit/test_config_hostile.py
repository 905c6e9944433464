"""Malformed and malicious experiment files and search spaces: accepted or rejected in bounded time and memory."""

import itertools
import json
import resource
import signal
import threading
from contextlib import contextmanager, suppress

import psutil
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nni_manager.config.diagnostics import MAX_DIAGNOSTICS, ConfigInvalid
from nni_manager.config.document import MAX_BYTES, read_json, read_yaml
from nni_manager.config.reader import read_experiment_file

pytestmark = pytest.mark.slow

V1 = """\
authorName: me
experimentName: mine
trialConcurrency: 1
maxTrialNum: 1
trainingServicePlatform: local
searchSpacePath: space.json
tuner:
  builtinTunerName: TPE
trial:
  command: python3 train.py
  codeDir: .
"""
V2 = """\
searchSpace:
  x: {_type: uniform, _value: [0, 1]}
trialCommand: python3 train.py
trialCodeDirectory: .
trialConcurrency: 1
maxTrialNumber: 1
tuner:
  name: TPE
trainingService:
  platform: local
"""
SPACE = {"x": {"_type": "uniform", "_value": [0, 1]}}
# The work takes less than this time even on a busy machine. Work without a bound would take minutes.
MAX_S = 60
MAX_MEMORY_BYTES = 1 << 30


@contextmanager
def in_bounds():
    """Fails the test if the enclosed code uses too much time or memory."""
    assert threading.current_thread() is threading.main_thread()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MAX_MEMORY_BYTES, before[1]))

    def too_long(*_):
        raise AssertionError(f"after {MAX_S} s it is still being read")

    handler = signal.signal(signal.SIGALRM, too_long)
    timer = signal.setitimer(signal.ITIMER_REAL, MAX_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    return tmp_path


def outcome(folder, content):
    """None for an accepted file, otherwise the text of all errors. Each error must be short and start with `cannot`."""
    path = folder / "config.yml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    try:
        read_experiment_file(path)
    except ConfigInvalid as error:
        refusal = error
    else:
        return None
    assert refusal.diagnostics
    for error in refusal.diagnostics:
        assert error.message.startswith("cannot ")
        assert len(error.message) < 2000
    assert len(str(refusal)) < 500_000
    return str(refusal)


def bomb(anchored, grown):
    """Ten YAML anchors. Each anchor but the first refers nine times to the previous anchor, so a kilobyte expands to billions of
    values.
    """
    names = "abcdefghij"
    lines = [f"{names[0]}: &{names[0]} {anchored}"]
    lines += [f"{after}: &{after} {grown(f'*{before}')}" for before, after in itertools.pairwise(names)]
    return "\n".join(lines) + "\n"


def nine(alias):
    return f"[{', '.join([alias] * 9)}]"


def merged_nine_times(alias):
    return f"{{<<: {nine(alias)}}}"


LISTS, MERGES = bomb("[x]", nine), bomb("{x: 1}", merged_nine_times)
HOSTILE = {
    "a bomb alone": LISTS,
    "a bomb beside v1": V1 + LISTS,
    "a bomb beside v2": V2 + LISTS,
    "a bomb as a name": LISTS + V1.replace("authorName: me", "authorName: *j"),
    "a bomb in class arguments": LISTS + V1.replace("Name: TPE", "Name: TPE\n  classArgs: {seed: *j}"),
    "a bomb as options": LISTS
    + V2.replace("{_type: uniform, _value: [0, 1]}", "{_type: choice, _value: *j}"),
    "a bomb as bounds": LISTS + V2.replace("[0, 1]", "*j"),
    "a bomb of merges": V1 + MERGES,
    "a bomb as a key": "? " + nine("&a " + nine("x")) + "\n: 1\n" + LISTS,
    "an anchor in itself": "a: &a [*a]\n" + V1,
    "a merge with itself": "a: &a {<<: *a}\n" + V1,
    "brackets": "a: " + "[" * 200_000,
    "closed brackets": "a: " + "[" * 5000 + "]" * 5000,
    "braces": "{a: " * 50_000,
    "an indented stair": "".join(" " * depth + "a:\n" for depth in range(700)),
    "dashes": "- " * 100_000,
    "a number in decimal": V1.replace("maxTrialNum: 1", f"maxTrialNum: {'9' * 100_000}"),
    "a number in hex": V1.replace("maxTrialNum: 1", f"maxTrialNum: 0x{'f' * 100_000}"),
    "a number to base 60": V1.replace("maxTrialNum: 1", f"maxTrialNum: {':'.join(['59'] * 10_000)}"),
    "a number in binary": V1.replace("trialConcurrency: 1", f"trialConcurrency: 0b{'1' * 100_000}"),
    "a number as a bound": V2.replace("[0, 1]", f"[0, 0x{'f' * 50_000}]"),
    "infinity": V1.replace("maxTrialNum: 1", "maxTrialNum: 1e999999"),
    "not a number": V2.replace("[0, 1]", "[.nan, .inf]"),
    "a long duration": V1 + f"maxExecDuration: {'9' * 4000}d\n",
    "a NUL": V1 + "\0",
    "a NUL in a path": V1.replace("codeDir: .", 'codeDir: "a\\0b"'),
    "half of a pair": V1.replace("authorName: me", 'authorName: "\\ud800"'),
    "half of a pair in a command": V1.replace("python3 train.py", '"\\ud800"'),
    "no UTF-8": V1.encode().replace(b"me", b"\xe4"),
    "UTF-16": V1.encode("utf-16"),
    "a tab": V1.replace("  command", "\tcommand"),
    "two documents": f"{V1}---\n{V1}",
    "no document": "---\n",
    "nothing": "",
    "a code of Python": V1 + "x: !!python/object/apply:os.system ['exit 1']\n",
    "a name of Python": V1 + "x: !!python/name:os.system\n",
    "a key of its own tag": V1 + "!!python/name:os.system : 1\n",
    "binary": V1 + "x: !!binary 'zzz'\n",
    "a set": V1 + "x: !!set {a, b}\n",
    "pairs": V1 + "x: !!omap [a, b]\n",
    "keys that are lists": V1 + "? [a, b]\n: 1\n",
    "keys of all kinds": V1 + "1: 2\n2.5: 2\ntrue: 3\nnull: 4\n2020-01-01: 5\n",
    "a day that is none": V1 + "x: 2024-99-99\n",
    "a thousand keys": V1 + "".join(f"key{number}: 1\n" for number in range(3000)),
    "one key, again and again": V1 + "key: 1\n" * 3000,
    "too many bytes": V1 + f"x: {'y' * MAX_BYTES}\n",
    "a long folder": V1.replace("codeDir: .", f"codeDir: {'d' * 300}"),
    "a long path": V1.replace("codeDir: .", f"codeDir: {'d/' * 5000}"),
    "a long search space": V1.replace("space.json", "s" * 300),
    "a long home": V1.replace("codeDir: .", f"codeDir: ~{'x' * 300}"),
    "a long log folder": V1 + f"logDir: {'d' * 5000}\n",
    "a device": V1.replace("space.json", "/dev/zero"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_experiment_file_is_rejected_with_error_messages_within_a_time_limit(folder, name):
    with in_bounds():
        assert outcome(folder, HOSTILE[name])


def test_the_files_that_the_hostile_cases_modify_are_valid(folder):
    assert outcome(folder, V1) is None
    assert outcome(folder, V2) is None
    few = "many: &many [1, 2, 3]\n"
    assert (
        outcome(folder, V2.replace("{_type: uniform, _value: [0, 1]}", "{_type: choice, _value: &v [1, 2]}"))
        is None
    )
    assert "there is no such key" in (outcome(folder, few + V1) or "")


def test_at_most_a_hundred_errors_of_one_kind_are_reported(folder):
    errors = outcome(folder, HOSTILE["a thousand keys"])
    assert errors.count("there is no such key") == MAX_DIAGNOSTICS
    assert (
        outcome(folder, HOSTILE["one key, again and again"]).count("has the same key; keep one")
        == MAX_DIAGNOSTICS
    )


DEEP_CHOICE = '{"_type": "choice", "_value": [' * 400 + "1" + "]}" * 400
SPACES = {
    "deep lists": "[" * 100_000,
    "deep mappings": '{"a":' * 100_000,
    "deep and closed": "[" * 900 + "]" * 900,
    "nested choices": '{"x": ' + DEEP_CHOICE + "}",
    "nested spaces": '{"x": '
    + '{"_type": "choice", "_value": [{"_name": "a", "x": ' * 300
    + "1"
    + "}]}" * 300
    + "}",
    "a long number": '{"x": ' + "9" * 100_000 + "}",
    "a long exponent": '{"x": {"_type": "uniform", "_value": [0, 1e99999]}}',
    "not a number": '{"x": {"_type": "uniform", "_value": [0, NaN]}}',
    "half of a pair": '{"\\ud800": {"_type": "uniform", "_value": [0, "\\ud800"]}}',
    "a NUL": '{"x": 1}\0',
    "keys again and again": "{" + '"x": 1, ' * 10_000 + '"x": 1}',
    "too many bytes": json.dumps({"x": {"_type": "choice", "_value": ["y" * MAX_BYTES]}}),
    "thousands of wrong options": json.dumps({f"x{number}": number for number in range(2000)}),
    "no UTF-8": b"\xff\xfe",
    "nothing": "",
}


@pytest.mark.parametrize("name", SPACES)
def test_a_hostile_search_space_is_rejected_with_error_messages_within_a_time_limit(folder, name):
    content = SPACES[name]
    (folder / "space.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with in_bounds():
        errors = outcome(folder, V1)
    assert errors
    if "choices" not in name and name not in ("keys again and again",):
        assert "space.json" in errors


@pytest.mark.parametrize("whole", [V1, V2])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_randomly_edited_experiment_file_is_accepted_or_rejected_without_a_crash(folder, whole, data):
    text = whole
    pieces = st.text(alphabet=" \t\n:-?,[]{}&*!|>'\"%@#ab01.~<", max_size=6) | st.sampled_from(
        [
            "*a",
            "&a ",
            "<<: *a",
            "!!int ",
            "!!binary ",
            "!!set ",
            "? ",
            "---\n",
            "\0",
            "\ud800",
            "\u2028",
            "0x",
            "1e9",
            "null",
            ".nan",
        ]
    )
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        text = text[:start] + data.draw(pieces) + text[start + data.draw(st.integers(0, 8)) :]
    outcome(folder, text)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=200)
    | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_any_bytes_are_parsed_as_a_document_or_rejected(folder, content):
    path = folder / "any"
    path.write_bytes(content)
    for read in (read_yaml, read_json):
        with suppress(ConfigInvalid):
            read(path)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("whole", [V1, V2])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_experiment_file_with_any_value_at_any_key_causes_no_crash(folder, whole, data):
    document = yaml.safe_load(whole)
    inside = document
    while True:
        key = data.draw(st.sampled_from(sorted(inside)))
        if not isinstance(inside[key], dict) or data.draw(st.booleans()):
            break
        inside = inside[key]
    inside[key] = data.draw(ANYTHING)
    outcome(folder, yaml.safe_dump(document, allow_unicode=True))


def test_an_experiment_file_of_512_kib_is_read_and_a_larger_experiment_file_is_refused(folder):
    comment = "#" * (512 * 1024 - len(V1) - 1) + "\n"
    assert outcome(folder, comment + V1) is None
    assert "524,288 bytes" in outcome(folder, "#" + comment + V1)
