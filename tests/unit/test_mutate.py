"""The mutation tester: the bugs it inserts, and the tests it selects."""

import textwrap

import mutant_finder
import mutate
import pytest


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


def test_the_explanation_of_a_surviving_mutant_is_assigned_to_the_mutants_file_and_changed_line():
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


def test_the_quick_tests_of_a_module_start_with_the_test_file_of_the_module():
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
