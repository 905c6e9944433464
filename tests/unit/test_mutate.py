"""The mutation tester: the bugs it inserts, the tests it selects, and its judgement of mutants with unit tests in forks."""

import json
import subprocess
import sys
import textwrap

import mutant_finder
import mutant_forks
import mutate
import pytest

pytestmark = pytest.mark.slow


def changes(source):
    """The changed line of each valid mutant: (before, after)."""
    source = textwrap.dedent(source)
    return [
        mutant.diff(source)
        for mutant in mutant_finder.mutants_of("m.py", source)
        if mutant_finder.is_valid(mutant, source)
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if a(b):", "if not (a(b)):"),
        ("if not a:", "if (a):"),
        ("while a:", "while not (a):"),
        ("c = 'ä' if a else b", "c = 'ä' if not (a) else b"),
        ("c = [x for x in a if b]", "c = [x for x in a if not (b)]"),
        ("c = a < b", "c = a <= b"),
        ("c = (a) not in (b)", "c = (a) in (b)"),
        ("c = a is None", "c = a is not None"),
        ("c = a and b", "c = a or b"),
        ("c = a + b", "c = a - b"),
        ("c = f(True)", "c = f(False)"),
        ("c = f(7)", "c = f(8)"),
        ("return a", "return None"),
        ("a.b(c)", "pass"),
        ("await a", "pass"),
        ("a.b = c", "pass"),
        ("a += b", "pass"),
        ("raise a", "pass"),
    ],
)
def test_each_kind_of_statement_has_its_expected_mutant(before, after):
    lines = [before, "    pass"] if before.endswith(":") else [before]
    source = "async def f(a, b):\n" + "".join(f"    {line}\n" for line in lines)
    assert (before, after) in changes(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""A module."""\nfrom typing import Any\nRETRY_S = 2.0\n_LIMIT = 5 * 1024',
        '@dataclass(frozen=True)\nclass A:\n    "A class."\n    a: Annotated[int, 5]\n    b: Literal[7] = None',
        "def f(a):\n    log.info('%s has %d', a, 5 + 1)",
        "class A:\n    def __init__(self, a):\n        self.a = a",
        "if TYPE_CHECKING:\n    from a import b",
        "a = f'{b + 1}'",
        "a = b + 'text'",
        "def f():\n    return None",
    ],
    ids=["numbers with names", "decorators", "log lines", "__init__", "types", "f-strings", "texts", "None"],
)
def test_no_mutants_are_made_of_string_constants_or_decorators_or_types_or_log_lines(source):
    assert changes(source) == []


def test_the_seed_determines_the_sample_of_mutants(tmp_path):
    (tmp_path / "m.py").write_text("".join(f"a{number} = f({number})\n" for number in range(200)))
    one, again, other = (mutant_finder.sampled(tmp_path, ["."], 10, seed) for seed in (1, 1, 2))
    assert one == again
    assert len({mutant.line for mutant in one}) == 10
    assert one != other
    assert len(mutant_finder.sampled(tmp_path, ["."], 1000, 1)) == 200
    assert mutant_finder.sampled(tmp_path, ["."], 1000, 1, only="other") == []


def test_the_explanation_of_a_surviving_mutant_is_found_by_its_file_and_changed_line():
    text = "# why\n\nm.py\n- a < b\n+ a <= b\nBoth are\nthe same.\n\nn.py\n- a\n+ b\nNo.\n"
    assert mutate.explanations(text) == {
        ("m.py", "a < b", "a <= b"): "Both are the same.",
        ("n.py", "a", "b"): "No.",
    }
    with pytest.raises(ValueError, match=r"cannot read the explanation .*: write path, - before"):
        mutate.explanations("m.py\n- a < b\n+ a <= b\n")


def test_each_explanation_of_a_surviving_mutant_belongs_to_existing_code():
    for path, before, after in mutate.explanations(mutate.EXPLAINED.read_text()):
        source = (mutate.ROOT / path).read_text()
        assert (before, after) in {mutant.diff(source) for mutant in mutant_finder.mutants_of(path, source)}


def test_the_test_file_of_a_module_comes_first_among_its_quick_tests():
    quick, *slow = mutate.tests_of(mutate.ROOT, "manager/nni_manager/engine/importance.py")
    assert quick[0] == "tests/unit/test_importance.py"
    assert "tests/integration/test_engine.py" in quick
    assert ["tests/integration/test_http_api.py"] in slow


def test_the_integration_tests_that_import_a_module_are_the_first_slow_tests_of_the_module():
    _, first, *others = mutate.tests_of(mutate.ROOT, "manager/nni_manager/engine/notifier.py")
    assert first == ["tests/integration/test_notifications.py"]
    assert ["tests/integration/test_changes.py"] in others


@pytest.mark.parametrize("folder", mutate.TARGETS)
def test_every_mutated_folder_and_its_test_files_exist(folder):
    assert list((mutate.ROOT / folder).glob("*.py"))
    for pattern in [*mutate.TARGETS[folder][0], *mutate.TARGETS[folder][1]]:
        assert list((mutate.ROOT / "tests").glob(pattern)), pattern


SMALL = """\
class Box:
    is_open: bool = False


def is_positive(number):
    return number > 0


def count_down(number):
    while number > 0:
        number -= 1
    return number


def adder(number):
    def add(other):
        return number + other

    return add


add_two = adder(2)


def after_another(number):
    return number + 1


def end_process(number):
    return number + 2


def unused(number):
    return number + 3


def also_used_by_a_failing_test(number):
    return number + 4
"""
TESTS = """\
import os
import small

earlier = []


def test_numbers():
    earlier.append(1)
    small.also_used_by_a_failing_test(1)
    assert small.is_positive(5)
    assert not small.is_positive(-5)
    assert small.add_two(3) == 5
    assert not small.Box.is_open


def test_that_counts():
    assert small.count_down(3) == 0


def test_that_needs_an_earlier_test():
    assert earlier and small.after_another(1)


def test_that_fails():
    assert small.also_used_by_a_failing_test(1)
    assert small.unused(1) == 0


def test_that_may_end_its_process():
    if small.end_process(1) != 3:
        os._exit(0)
"""


@pytest.fixture(scope="module")
def verdict_of(tmp_path_factory):
    """Return a function: the verdict on the mutant that changes a line of SMALL to this line."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "small.py").write_text(SMALL)
    (folder / "test_small.py").write_text(TESTS)
    # The import of the pytest plugin of schemathesis takes seconds, so pytest must not load it.
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:schemathesis\npythonpath = .\n")
    mutants = mutant_finder.mutants_of("small.py", SMALL)
    request = mutant_forks.Request(str(folder), ["test_small.py"], mutants, workers=2, hang_s=1)
    (folder / "request").write_text(request.to_json())
    command = [sys.executable, mutant_forks.__file__, "request"]
    lines = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    verdicts = {number: (verdict, test) for number, verdict, test in map(json.loads, lines)}
    assert len(lines) == len(verdicts) == len(mutants)
    assert (folder / "small.py").read_text() == SMALL

    def verdict(line, after):
        (found,) = (
            verdicts[number]
            for number, mutant in enumerate(mutants)
            if (mutant.line, mutant.diff(SMALL)[1]) == (line_of(line), after)
        )
        return found

    return verdict


def line_of(text):
    """The number of the only line of SMALL that contains the text."""
    (found,) = (number for number, line in enumerate(SMALL.splitlines(), 1) if text in line)
    return found


def test_a_mutant_is_killed_in_a_fork_by_the_test_that_fails(verdict_of):
    assert verdict_of("return number > 0", "return None") == ("killed", "test_small.py::test_numbers")


def test_a_mutant_survives_in_forks_if_no_test_fails(verdict_of):
    assert verdict_of("return number > 0", "return number > 1") == ("survived", "")


def test_a_test_that_hangs_in_a_fork_kills_the_mutant(verdict_of):
    assert verdict_of("number -= 1", "pass") == ("killed", "test_small.py::test_that_counts")


def test_a_test_that_ends_its_process_kills_the_mutant(verdict_of):
    assert verdict_of("number + 2", "return number - 2") == (
        "killed",
        "test_small.py::test_that_may_end_its_process",
    )


def test_a_test_that_fails_without_a_mutant_when_it_runs_alone_kills_no_mutant_in_a_fork(verdict_of):
    assert verdict_of("number + 1", "return None") == ("unjudged", "")


def test_a_mutant_is_not_judged_in_a_fork_if_no_passing_test_executes_it(verdict_of):
    assert verdict_of("number + 3", "return None") == ("unjudged", "")


def test_a_mutant_that_survives_in_forks_is_unjudged_if_a_failing_test_executes_it(verdict_of):
    assert verdict_of("number + 4", "return None") == ("unjudged", "")


def test_a_mutant_of_code_that_runs_at_import_is_not_judged_in_a_fork(verdict_of):
    assert verdict_of("is_open: bool", "is_open: bool = True") == ("unjudged", "")
    assert verdict_of("add_two = ", "add_two = adder(3)") == ("unjudged", "")


def test_a_mutant_of_a_closure_is_judged_in_a_fork_unless_it_changes_the_variables_of_the_closure(verdict_of):
    assert verdict_of("return number + other", "return number - other") == (
        "killed",
        "test_small.py::test_numbers",
    )
    assert verdict_of("return number + other", "return None") == ("unjudged", "")
