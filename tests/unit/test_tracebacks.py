"""The exception line in the stderr of a Python program: tracebacks recorded from this interpreter, and constructed tracebacks."""

import subprocess
import sys
import textwrap

import pytest
from deadlines import DEADLINE_S
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.tracebacks import exception_line

PROGRAMS = {
    "raised in a function": ("def f():\n    raise ValueError('bad lr')\nf()", "ValueError: bad lr"),
    "without a message": ("assert 1 == 2", "AssertionError"),
    "message on the next line": (
        "raise AssertionError('\\nNot equal\\nrtol=1')",
        "AssertionError: Not equal",
    ),
    "message of many lines": (
        "raise RuntimeError('first\\nsecond: x\\n\\n  indented\\nKeyError: last')",
        "RuntimeError: first",
    ),
    "chained": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('wrapped') from e",
        "RuntimeError: wrapped",
    ),
    "raised while another was handled": (
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['lr']",
        "KeyError: 'lr'",
    ),
    "lines after it": (
        "import atexit, sys\natexit.register(lambda: print('<https://example.org/x>\\nDone: all', file=sys.stderr))\n"
        "raise ValueError('bad')",
        "ValueError: bad",
    ),
    "ignored at the end": (
        "class A:\n    def __del__(self):\n        raise OSError('late')\na = A()\nraise ValueError('bad')",
        "ValueError: bad",
    ),
    "in a thread before": (
        "import threading\ndef f():\n    raise KeyError('thread')\nt = threading.Thread(target=f)\nt.start()\nt.join()\n"
        "raise RuntimeError('main')",
        "RuntimeError: main",
    ),
    "in a pool": (
        "from multiprocessing import Pool\ndef f(x):\n    raise ValueError('in pool')\n"
        "if __name__ == '__main__':\n    Pool(1).map(f, [1])",
        "ValueError: in pool",
    ),
    "logged before": (
        "import logging\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.exception('went on')\nraise OSError('disk')",
        "OSError: disk",
    ),
    "syntax": ("def f(:\n    pass", "SyntaxError: invalid syntax"),
    "recursion": ("def f():\n    f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    "no such module": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "a class of a function": (
        "def f():\n    class Bad(Exception):\n        pass\n    raise Bad('x')\nf()",
        "f.<locals>.Bad: x",
    ),
    "a class of a module": (
        "import struct\nstruct.unpack('i', b'')",
        "struct.error: unpack requires a buffer of 4 bytes",
    ),
    "interrupted": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "a message that is not ASCII": ("raise ValueError('na\u00efve \u6570')", "ValueError: na\u00efve \u6570"),
    "an operator that begins a line": (
        "class Foo: pass\nx = (Foo()\n     | Foo())",
        "TypeError: unsupported operand type(s) for |: 'Foo' and 'Foo'",
    ),
    "the interpreter itself": (
        "import faulthandler, os\nfaulthandler.enable()\nos.abort()",
        "Fatal Python error: Aborted",
    ),
    "no exception": ("import sys\nsys.exit('usage: none')", ""),
    "a stack that was printed": (
        "import traceback\ntraceback.print_stack()\nraise SystemExit('loss: 0.3')",
        "",
    ),
}
GROUPS = {
    "a group": (
        "raise ExceptionGroup('many', [ValueError('one'), ExceptionGroup('inner', [TypeError('two')])])",
        "ExceptionGroup: many (2 sub-exceptions)",
    ),
    "a group of raised exceptions": (
        "def g(x):\n    try:\n        raise x\n    except Exception as e:\n        return e\n"
        "raise ExceptionGroup('many', [g(ValueError('one')), g(KeyError(2))])",
        "ExceptionGroup: many (2 sub-exceptions)",
    ),
    "a group after an exception": (
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ExceptionGroup('many', [ValueError('one')])",
        "ExceptionGroup: many (1 sub-exception)",
    ),
    "an exception after a group": (
        "try:\n    raise ExceptionGroup('many', [ValueError('one')])\nexcept Exception:\n    raise RuntimeError('after')",
        "RuntimeError: after",
    ),
    "notes": ("e = ValueError('bad')\ne.add_note('seen: at 3')\nraise e", "ValueError: bad"),
}


def stderr_of(program, folder):
    (folder / "train.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "train.py"],
        cwd=folder,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.stderr.decode()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_exception_that_ended_a_program_is_found_in_its_stderr(tmp_path, name):
    program, line = PROGRAMS[name]
    assert exception_line(stderr_of(program, tmp_path)) == line


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python has no exception groups and no notes")
@pytest.mark.parametrize("name", GROUPS)
def test_the_exception_line_of_an_exception_group_contains_the_name_of_the_group(tmp_path, name):
    program, line = GROUPS[name]
    assert exception_line(stderr_of(program, tmp_path)) == line


def a_traceback(line="ValueError: bad"):
    return f'Traceback (most recent call last):\n  File "train.py", line 3, in f\n    raise x\n    ^^^^^^^\n{line}\n'


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("", ""),
        ("loss: 0.3\nValueError: not raised\n", ""),
        ('  File "config.yml" was read\nValueError: not raised\n', ""),
        # This stderr was truncated at its start, so its first line is incomplete.
        (a_traceback().partition("recent")[2], "ValueError: bad"),
        (a_traceback().replace("\n", "\r\n"), "ValueError: bad"),
        (textwrap.indent(a_traceback(), "[rank0]: "), "ValueError: bad"),
        (a_traceback("\x1b[1;35mValueError\x1b[0m: \x1b[35mbad\x1b[0m"), "ValueError: bad"),
        (a_traceback("ray.exceptions.RayTaskError(ValueError): \x1b[36mx\x1b[0m"),
         "ray.exceptions.RayTaskError(ValueError): x"),
        (a_traceback() + "Exception ignored in: <stdout>\nBrokenPipeError: [Errno 32] Broken pipe\n", "ValueError: bad"),
        ("Exception ignored in: <stdout>\nBrokenPipeError: [Errno 32] Broken pipe\n" + a_traceback(), "ValueError: bad"),
        ("Exception ignored in: <x>\n" + a_traceback("OSError: ignored"), ""),
        (a_traceback("loss: 0.3\nINFO: done"), ""),
        (a_traceback("ValueError:"), "ValueError:"),
        (a_traceback("ValueError:\n\n  bad"), "ValueError: bad"),
        # Python 3.13 shows all lines of an expression in a traceback, and marks them with carets.
        (a_traceback().replace("    raise x\n", "    x = (Foo\n        | Bar\n        ^^^^^\n"), "ValueError: bad"),
    ],
)  # fmt: skip
def test_the_exception_line_is_empty_if_stderr_has_no_exception(stderr, line):
    assert exception_line(stderr) == line


@given(
    st.text()
    | st.lists(
        st.sampled_from(
            [*a_traceback().splitlines(keepends=True), "  | ", "    +-", "\n", "x: y\n", "X: y\n"]
        )
    ).map("".join)
)
def test_at_most_one_exception_line_is_found_in_any_stderr(stderr):
    line = exception_line(stderr)
    assert len(line.splitlines()) <= 1


@given(
    before=st.text(),
    message=st.from_regex(r"\w[\w .,:]*\w", fullmatch=True),
    after=st.lists(st.from_regex(r"\S[^\n\r]*", fullmatch=True)),
)
def test_output_before_and_after_a_traceback_does_not_change_the_exception_line(before, message, after):
    stderr = f"{before}\n{a_traceback(f'ValueError: {message}')}" + "".join(f"{each}\n" for each in after)
    has_other = any('  File "' in each or each.startswith("Fatal Python error") for each in after)
    assert has_other or exception_line(stderr) == f"ValueError: {message}"
