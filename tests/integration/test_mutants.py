"""The mutation tester on a small source tree. It changes a copy of the tree and runs the tests of the copy. The checkout stays
unchanged.
"""

import subprocess

import mutant_finder
import mutate
import pytest

CODE = "def is_positive(a):\n    return a > 0\n\n\ndef unused(a):\n    return a + 1\n"
TESTS = "from small import is_positive\n\n\ndef test_is_positive():\n    assert is_positive(5)\n    assert not is_positive(-5)\n"
FAILS_ANYWAY = "def test_that_always_fails():\n    assert False\n"
HANGS = "import small\n\n\ndef test_that_never_ends():\n    while small.unused(0) != 1:\n        pass\n"


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "checkout"
    (root / "tests").mkdir(parents=True)
    (root / "small.py").write_text(CODE)
    # The pytest plugin of schemathesis is disabled, because its import takes seconds.
    (root / "pytest.ini").write_text("[pytest]\naddopts = -p no:schemathesis\n")
    (root / "tests/test_signs.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


@pytest.fixture
def copy(tree, tmp_path):
    copy = mutate.Copy(tree, tmp_path / "work" / "0")
    yield copy
    copy.end()


def mutant(line, text):
    """The mutant that replaces this line with this text."""
    (found,) = (
        each
        for each in mutant_finder.mutants_of("small.py", CODE)
        if (each.line, each.diff(CODE)[1]) == (line, text)
    )
    return found


DETECTED, UNDETECTED, UNUSED = mutant(2, "return None"), mutant(2, "return a > 1"), mutant(6, "return a - 1")


def judge(tree, *tests):
    return mutate.Judge(tree, lambda _: [list(tests)])


def test_a_mutant_is_killed_if_it_makes_a_test_fail_and_survives_otherwise(tree, copy):
    judged = judge(tree, "tests/test_signs.py")
    assert judged.killer(copy, DETECTED) == "tests/test_signs.py::test_is_positive"
    assert judged.killer(copy, UNDETECTED) == ""
    assert judged.killer(copy, UNUSED) == ""
    assert (tree / "small.py").read_text() == CODE == (copy.tree / "small.py").read_text()


def test_a_test_that_fails_without_a_mutant_kills_no_mutant_and_hides_no_other_test(tree, copy, capsys):
    (copy.tree / "tests/test_anyway.py").write_text(FAILS_ANYWAY)
    judged = judge(tree, "tests/test_anyway.py", "tests/test_signs.py")
    assert judged.killer(copy, UNDETECTED) == ""
    assert judged.killer(copy, DETECTED) == "tests/test_signs.py::test_is_positive"
    assert capsys.readouterr().out.count("fails without a mutant as well") == 1


def test_a_mutant_is_killed_if_a_test_hangs(tree, copy, monkeypatch):
    monkeypatch.setattr(mutate, "TEST_TIMEOUT_S", 1)
    (copy.tree / "tests/test_hang.py").write_text(HANGS)
    assert judge(tree, "tests/test_hang.py").killer(copy, UNUSED)


def test_a_copy_of_the_source_tree_runs_no_test_after_it_was_ended(tree, copy):
    copy.end()
    with pytest.raises(KeyboardInterrupt):
        judge(tree, "tests/test_signs.py").killer(copy, UNDETECTED)
