"""Trials that are forks of a warm interpreter are compared with the same scripts in a new process of the same Python."""

import contextlib
import ctypes
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from amounts import amount
from deadlines import DEADLINE_S, scaled_s
from hypothesis import given
from hypothesis import strategies as st
from pythons import each_of, python_of
from real_experiment import wait_until

from nni_sdk.records import decode
from trial_keeper.core.warm_command import WarmCommand, warm_command
from trial_keeper.errors import WarmStartRefused
from trial_keeper.host.warm import WarmInterpreter, WarmStart
from trial_keeper.processes import adopt_orphans

CONTAINER = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "LANG": "C.UTF-8"}
TRIAL = {"PYTHONUNBUFFERED": "1", "NNI_PLATFORM": "local"}
READY_S = scaled_s(60.0)


PYTHONS = {f"3.{minor}": python_of(f"3.{minor}") for minor in range(8, 15)}


@dataclass
class Site:
    """A folder with a script. The methods run the script and return its result."""

    folder: Path

    def write(self, source, name="train.py"):
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(source)

    def warm_start(self, *arguments, python="python", environ=None, script="train.py", is_unbuffered=False):
        return WarmStart(
            WarmCommand(python, script, arguments, is_unbuffered),
            str(self.folder),
            CONTAINER | TRIAL if environ is None else environ,
            self.folder / "warm.out",
            self.folder / "warm.err",
        )

    def warmly(self, interpreter, *arguments, **options):
        """Run the script in a fork; return its exit code as Popen would return it, its stdout and its stderr."""
        start = self.warm_start(*arguments, **options)
        status = ended(interpreter.start(start))
        shown = text_of(start.stdout), text_of(start.stderr)
        start.stdout.unlink()
        start.stderr.unlink()
        return status, *shown

    def plainly(self, python, *arguments, environ=None, script="train.py", is_unbuffered=False, cwd=None):
        """Run the script in a new process; return the same values as warmly()."""
        flags = ["-u"] if is_unbuffered else []
        with (self.folder / "out").open("w") as out, (self.folder / "err").open("w") as err:
            code = subprocess.run(
                [python, *flags, script, *arguments],
                cwd=cwd or self.folder,
                env=CONTAINER | TRIAL if environ is None else environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                timeout=DEADLINE_S,
            ).returncode
        return code, text_of(self.folder / "out"), text_of(self.folder / "err")


def text_of(path):
    return path.read_bytes().decode(errors="backslashreplace")


def ended(pid):
    """Wait until a child has ended; return its exit code, or -n for signal n."""
    descriptor = os.pidfd_open(pid)
    try:
        assert select.select([descriptor], [], [], 60)[0], f"process {pid} still runs"
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(scope="module", autouse=True)
def _adopts_orphans():
    adopt_orphans()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # resets PR_SET_CHILD_SUBREAPER for the tests of other files


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


@pytest.fixture(scope="module")
def warm_of():
    """Return a function that makes a warm interpreter. With the same arguments again, the function returns the earlier
    interpreter.
    """
    made = {}

    def make(*imports, python=sys.executable, **environ):
        key = (python, imports, *sorted(environ.items()))
        if key not in made:
            made[key] = WarmInterpreter(python, imports, CONTAINER | environ)
        assert made[key].is_ready(READY_S)
        return made[key]

    yield make
    for interpreter in made.values():
        interpreter.close()


@pytest.fixture
def warm(warm_of):
    return warm_of("random")


# ---- the same behaviour as `python script.py`

# The script prints everything by which a script could detect how it was started.
LOOK = """
import os, resource, signal, sys, threading
print(sorted(os.listdir("/proc/self/fd")))  # first: popen below may be slow to close its own
print(sorted(globals()), __name__, __file__, __doc__, __spec__, __package__, type(__loader__), __builtins__)
print(sys.argv, getattr(sys, "orig_argv", None), sys.path, sys.executable, sys.flags, os.getcwd())
print(sorted(os.environ.items()), os.popen("env | grep -v ^_= | sort").read())
print(sys.modules["__main__"].__dict__ is globals(), threading.enumerate(), threading.current_thread())
print([signal.getsignal(number) for number in sorted(signal.valid_signals())])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), [resource.getrlimit(i) for i in range(16)])
print(oct(os.umask(0)), os.getsid(0) == os.getpgid(0) == os.getpid(), repr(sys.stdin.read()))
print(os.readlink("/proc/self/fd/0"), sys.excepthook)
for stream in sys.stdin, sys.stdout, sys.stderr:
    print(stream, type(stream.buffer), stream.newlines, stream.errors, stream.line_buffering, stream.write_through)
print(sys.__stdout__ is sys.stdout, sys.__stderr__ is sys.stderr, sys.__stdin__ is sys.stdin)
"""
EXITS = [
    f"import sys; sys.exit({value})" for value in ("", 0, 3, 263, -1, True, 2.5, "'why'", ["é"], "'é\\udcff'")
]
ENDINGS = [
    "",
    *EXITS,
    "raise SystemExit",
    "def f():\n    return 1 / 0\nf()",
    "raise ValueError('é')",
    "try:\n    1 / 0\nexcept Exception as e:\n    raise OSError(2, 'no') from e",
    "raise KeyboardInterrupt",
    "def f(:\n    pass",
    "# coding: latin-1\nprint('é')",
    "print('\\udcff')",
    *(f"import os; os.kill(os.getpid(), {number})" for number in (1, 2, 9, 15)),
    "import os; print('gone', end=''); os._exit(9)",
    "import os; os.abort()",
    "import atexit, sys\natexit.register(print, 'last')\nsys.exit(5)",
    "import atexit\natexit.register(lambda: 1 / 0)",
    "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[1], a[2].tb_lineno, a[1].__traceback__ is a[2])\n1/0",
    "import sys, traceback\nsys.excepthook = lambda *a: traceback.print_exception(*a)\n1/0",
    "import atexit, sys\natexit.register(lambda: print(sys.last_traceback.tb_next))\n1 / 0",
    "import threading\nm = threading.main_thread()\nthreading.Thread(target=lambda: (m.join(), print('late'))).start()",
    "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()",
    "import sys\nsys.stdout = open('/dev/full', 'w')\nprint('lost')",
    "import sys\nsys.stdout.close()",
    "f = open('kept', 'w')\nf.write('not flushed')",
    "class A:\n    def __del__(self):\n        print('deleted', A is None)\na = A()",
    "import builtins\nbuiltins.f = open('kept', 'w')\nf.write('not flushed')",
    "import json\njson.f = open('kept', 'w')\njson.f.write('not flushed')",
    "import helper\nhelper.f = open('kept', 'w')\nhelper.f.write('not flushed')",
    "import helper\nexec('def g(): pass', vars(helper))\nhelper.f = open('kept', 'w')\nhelper.f.write('not flushed')",
    "import helper\nclass A:\n    def __del__(self):\n        print('of helper')\nhelper.a = A()",
    "class A:\n    def __del__(self):\n        print('in a ring')\na = A()\na.a = a",
    "import sys\nclass A:\n    def __del__(self):\n        sys.stdout.write('late')\na = A()",
    "import sys\ndef hook(*a):\n    raise SystemExit(5)\nsys.excepthook = hook\n1 / 0",
    "import ctypes\nctypes.CDLL(None).printf(b'of the C library')",
    "import atexit, os\natexit.register(lambda: os._exit(4))",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    "import threading\nx = 1\ndef loop():\n    while True:\n        x + 1\n"
    "threading.Thread(target=loop, daemon=True).start()",
    "import sys\nsys.modules.clear()",
    "import sys, json\ndel sys.modules['json']\nimport json\njson.f = open('kept', 'w')\njson.f.write('not flushed')",
    "import helper, sys\nhelper.f = open('kept', 'w')\nhelper.f.write('not flushed')\n"
    "for name in reversed(sys.modules):\n    if name != 'helper':\n        del sys.modules[name]\n        break",
    "import helper, sys, importlib\nname = [n for n in sys.modules if n != 'helper'][-1]\ndel sys.modules[name]\n"
    "importlib.import_module(name)\nclass A:\n    def __del__(self):\n        print('of helper')\nhelper.a = A()",
    "import sys\nsys.modules['x'] = None\nsys.modules['y'] = 5\nsys.stdout = None",
    "import sys, types\nsys.modules['gone'] = types.ModuleType('gone')\nclass A:\n    def __del__(self):\n"
    "        sys.modules.pop('gone', None)\na = A()\na.a = a\ndel a",
    "import sys, collections, gc\nsys.modules['x'] = gc\nsys.modules = collections.UserDict(sys.modules)",
    "import sys, gc, helper\nsys.modules['x'] = gc\nhelper.f = open('kept', 'w')\nhelper.f.write('not flushed')",
    *(
        "import helper, sys, importlib\nclass A:\n    def __del__(self):\n        print('of helper')\nhelper.a = A()\n"
        f"name = [n for n in sys.modules if n != 'helper'][-1]\n{moves}"
        for moves in (
            "importlib.reload(sys.modules[name])",
            "m = sys.modules.pop(name)\nsys.modules[name] = m",
            "import json\nm = sys.modules.pop('json')\nsys.modules['json'] = m",
        )
    ),
    "import json, _pyio\njson.f = _pyio.open('kept', 'w')\njson.f.write('not flushed')",
    "import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)",
    "import pickle\nclass A:\n    pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "import __main__\nprint(__main__.__file__, vars(__main__) is globals())",
    "import helper\nprint(helper.__file__)",
    "def f(x: undefined): pass",
    "import multiprocessing as m\nif __name__ == '__main__':\n"
    "    for kind in 'fork', 'spawn':\n        p = m.get_context(kind).Process(target=print, args=(kind,))\n"
    "        p.start()\n        p.join()\n        print(p.exitcode)",
]


def comparable(result):
    """The result without the values that differ between any two runs."""
    return [re.sub(r"0x[0-9a-f]+|<Thread\(\S+, started \d+|started \d+", "", str(part)) for part in result]


def endings_for(python):
    """The test cases about the ways in which a script can end. The Python of the tests gets all cases. In the short test, each
    other Python gets a third of them.
    """
    if python == PYTHONS.get(f"3.{sys.version_info.minor}"):
        return ENDINGS
    return ENDINGS[[*PYTHONS.values()].index(python) % amount(3, 1) :: amount(3, 1)]


@pytest.mark.parametrize("python", each_of(PYTHONS))
def test_a_script_in_a_fork_has_the_same_exit_code_and_output_as_in_a_new_process(warm_of, site, python):
    interpreter = warm_of(python=python)
    site.write("", "helper.py")
    for source in endings_for(python):
        site.write(source)
        wanted = site.plainly(python)
        kept = (site.folder / "kept").read_text() if (site.folder / "kept").exists() else None
        (site.folder / "kept").unlink(missing_ok=True)
        assert comparable(site.warmly(interpreter)) == comparable(wanted), source
        if kept is not None:
            assert (site.folder / "kept").read_text() == kept == "not flushed"
            (site.folder / "kept").unlink()


@pytest.mark.parametrize("python", each_of(PYTHONS))
@pytest.mark.parametrize(
    "script", ["train.py", "./train.py", "../{}/train.py", "src/train.py", "link.py", "{}/train.py"]
)
def test_a_script_in_a_fork_has_the_same_process_state_as_in_a_new_process(warm_of, site, python, script):
    interpreter = warm_of(python=python)
    script = script.format(site.folder.name if script.startswith("..") else site.folder)
    site.write(LOOK)
    site.write(LOOK, "src/train.py")
    (site.folder / "link.py").symlink_to("src/train.py")
    warm = site.warmly(interpreter, "a b", "é", "", script=script, python=python)
    plain = site.plainly(python, "a b", "é", "", script=script)
    for ours, theirs in zip(comparable(warm), comparable(plain), strict=True):
        assert ours.splitlines() == theirs.splitlines()
    assert (warm[0], warm[2]) == (0, "")


@pytest.mark.parametrize(
    ("variable", "is_unbuffered"), [(None, False), (None, True), ("1", False), ("1", True)]
)
@pytest.mark.parametrize("python", each_of(PYTHONS))
def test_output_in_a_fork_is_buffered_as_in_a_new_process(warm_of, site, python, variable, is_unbuffered):
    site.write(
        "import sys\nfor s in sys.stdin, sys.stdout, sys.stderr:\n"
        "    print(type(s.buffer), s.line_buffering, s.write_through)\n"
        "import os\nsys.stdout.write('a')\nsys.stdout.buffer.write(b'b')\nsys.stderr.write('c\\nd')\nos._exit(0)"
    )
    options = {
        "environ": CONTAINER | ({"PYTHONUNBUFFERED": variable} if variable else {}),
        "is_unbuffered": is_unbuffered,
    }
    wanted = site.plainly(python, **options)
    assert site.warmly(warm_of(python=python), **options) == wanted
    assert wanted[1].endswith("ab") == bool(variable or is_unbuffered)


@pytest.mark.parametrize("path", [".", "lib:", ":/nowhere", "../{0}/lib:/tmp"])
def test_a_relative_python_path_is_resolved_against_the_code_folder_of_the_trial(warm_of, site, path):
    environ = {"PYTHONPATH": path.format(site.folder.name)}
    site.write("print('found')", "lib/of_lib.py")
    site.write(
        "import sys; sys.path.pop(0); print(sys.path)\ntry:\n    import of_lib\nexcept ImportError: pass"
    )
    environ_of_trial = CONTAINER | TRIAL | environ
    wanted = site.plainly(sys.executable, environ=environ_of_trial)
    assert site.warmly(warm_of(**environ), environ=environ_of_trial) == wanted


def test_environment_changes_of_a_preloaded_module_do_not_affect_trials(warm_of, site):
    site.write("import os; os.environ['SET'] = 'x'; os.environ['LANG'] = 'y'; del os.environ['HOME']", "m.py")
    path = {"PYTHONPATH": str(site.folder)}
    site.write("import os; print(sorted(os.environ.items()), os.popen('env | grep -v ^_= | sort').read())")
    environ = CONTAINER | TRIAL | path
    del environ["PATH"]
    wanted = site.plainly(sys.executable, environ=environ)
    assert site.warmly(warm_of("m", **path), environ=environ) == wanted


def test_pwd_variables_set_by_a_shell_wrapper_of_python_do_not_affect_trials(warm_of, site):
    shim = site.folder / "python"
    shim.write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    shim.chmod(0o755)
    site.write("import os; print([os.environ.get(name) for name in ('PWD', 'OLDPWD')])")
    interpreter = warm_of(python=str(shim))
    assert site.warmly(interpreter) == (0, "[None, None]\n", "")
    environ = CONTAINER | TRIAL | {"PWD": "/a"}
    assert site.warmly(interpreter, environ=environ) == (0, "['/a', None]\n", "")


# This script shows how bash splits a command into words: `python` is a shell function that prints its arguments.
SHOW = "python() {{ printf '%s\\0' \"$@\"; }}; {}"


@given(st.text(st.sampled_from("a.=-/ \t\n'\"\\$~*?[]{}!#&;|<>()`,%@^:+é\x01")))
def test_the_function_warm_command_splits_a_command_into_the_same_words_as_bash(text):
    command = f"python train.py {text}"
    parsed = warm_command(command)
    if parsed is None:
        return
    shown = subprocess.run(
        ["bash", "-c", SHOW.format(command)], capture_output=True, check=True, cwd="/"
    ).stdout
    flags = ["-u"] if parsed.is_unbuffered else []
    wanted = [*flags, parsed.script, *parsed.arguments]
    assert [word.decode() for word in shown.split(b"\0")[:-1]] == wanted


# ---- isolation of trials

LEAKS = {
    "environment": (
        "os.environ['LEFT'] = '1'; os.putenv('LEFT2', '1')",
        "os.environ.get('LEFT'), os.popen('env').read()",
    ),
    "working folder": ("os.chdir('/usr')", "os.getcwd()"),
    "umask": ("os.umask(0o7)", "os.umask(0)"),
    "signal mask": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [1, 15])",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [])",
    ),
    "signal handlers": ("signal.signal(15, signal.SIG_IGN)", "signal.getsignal(15)"),
    "descriptors": ("os.set_inheritable(os.dup(1), True); os.pipe()", "sorted(os.listdir('/proc/self/fd'))"),
    "flags of stdin": ("os.set_blocking(0, False)", "os.get_blocking(0)"),
    "limits": ("resource.setrlimit(7, (99, resource.getrlimit(7)[1]))", "resource.getrlimit(7)"),
    "imported modules": ("import helper; helper.x = 5", "'helper' in sys.modules, __import__('helper').x"),
    "changed modules": ("random.random = None; sys.left = 1", "random.random, hasattr(sys, 'left')"),
    "search path": ("sys.path.insert(0, '/left')", "sys.path"),
    "names of the script": ("left = 1", "'left' in globals()"),
    "priority": ("os.nice(3)", "os.nice(0)"),
    "process name": ("open('/proc/self/comm', 'w').write('left')", "open('/proc/self/comm').read()"),
}
MODULES = "import os, random, resource, signal, sys\n"


@pytest.mark.parametrize("what", LEAKS)
def test_a_trial_that_changes_process_state_does_not_affect_the_next_trial(warm, site, what):
    change, look = LEAKS[what]
    site.write("x = 1", "helper.py")
    site.write(f"{MODULES}print({look})", "look.py")
    before = comparable(site.warmly(warm, script="look.py"))
    assert before[0] == "0", before
    # The case `imported modules` needs a module that both scripts can import and that is not imported before a script starts.
    site.write(f"{MODULES}{change}\nprint({look})")
    changed = comparable(site.warmly(warm))
    assert changed[0] == "0", changed
    assert changed[1] != before[1] or what == "priority"
    assert comparable(site.warmly(warm, script="look.py")) == before


def test_a_resource_limit_raised_by_a_trial_does_not_affect_the_next_trial(warm, site):
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        interpreter = WarmInterpreter(sys.executable, (), CONTAINER)
        with contextlib.closing(interpreter):
            site.write(
                "import resource as r\nprint(r.getrlimit(4)[0])\nr.setrlimit(4, (r.getrlimit(4)[1],) * 2)"
            )
            assert [site.warmly(interpreter)[1] for _ in range(2)] == ["0\n", "0\n"]
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def test_the_random_numbers_of_forked_trials_differ(warm_of, site):
    pytest.importorskip("numpy")
    site.write("import random, numpy\nprint(random.random(), numpy.random.random())")
    interpreter = warm_of("random", "numpy")
    shown = {number for _ in range(3) for number in site.warmly(interpreter)[1].split()}
    assert len(shown) == 6


def waiting_fork(interpreter):
    """Wait until the standby fork for the next trial exists, and return it."""
    return waiting_forks(interpreter, 1)[0]


def prepared_fork(interpreter):
    """Wait until a fork is prepared for a trial, and return the fork. By then, a second fork waits for the next trial."""
    return min(waiting_forks(interpreter, 2), key=lambda fork: (fork.create_time(), fork.pid))


def waiting_forks(interpreter, count):
    own = psutil.Process(interpreter.pid)

    def found():
        forks = [child for child in psutil.Process().children() if child.pid != interpreter.pid]
        waiting = [fork for fork in forks if is_of(fork)]
        return not own.children() and len(waiting) == count and waiting

    def is_of(fork):
        return os.getsid(fork.pid) == interpreter.pid and fork.status() != psutil.STATUS_ZOMBIE

    return wait_until(found, f"{count} standby forks exist")


def test_a_killed_standby_fork_is_replaced(warm, site):
    site.write("print('here')")
    for _ in range(5):
        for _ in range(2):
            fork = waiting_fork(warm)
            fork.kill()
            os.waitpid(fork.pid, 0)
        assert site.warmly(warm)[:2] == (0, "here\n")


def test_a_warm_start_is_refused_after_three_standby_forks_were_killed(warm, site):
    site.write("print('here')")
    for _ in range(3):
        fork = waiting_fork(warm)
        fork.kill()
        os.waitpid(fork.pid, 0)
    with pytest.raises(WarmStartRefused, match="3 forks of the interpreter died while idle"):
        warm.start(site.warm_start())
    assert site.warmly(warm)[:2] == (0, "here\n")


def test_two_hundred_trials_leave_no_thread_and_no_open_descriptor(warm, site):
    site.write("import sys; sys.exit(int(sys.argv[1]) % 256)")

    def state():
        waiting_fork(warm)
        return process.num_fds(), process.num_threads(), len(os.listdir("/proc/self/fd"))

    process = psutil.Process(warm.pid)
    assert site.warmly(warm, "0")[0] == 0
    before = state()
    assert [site.warmly(warm, str(i))[0] for i in range(200)] == list(range(200))
    assert state() == before


def test_a_preloaded_sdk_writes_each_report_to_the_folder_of_the_reporting_trial(warm_of, site):
    folder = str(Path(decode.__code__.co_filename).parents[1])
    interpreter = warm_of("nni_sdk", PYTHONPATH=folder)
    site.write(
        "import nni_sdk as nni\nnni.report_final_result(nni.get_next_parameter()['x'])\nprint(nni.get_trial_id())"
    )
    for i in range(3):
        system = site.folder / f"trial{i}"
        (system / ".nni").mkdir(parents=True)
        (system / "parameter.cfg").write_text(f'{{"parameter_id": {i}, "parameters": {{"x": {i}}}}}')
        variables = {"PYTHONPATH": folder, "NNI_TRIAL_JOB_ID": f"t{i}", "NNI_SYS_DIR": str(system)}
        assert site.warmly(interpreter, environ=CONTAINER | TRIAL | variables) == (0, f"t{i}\n", "")
        (record,) = decode((system / ".nni" / "metrics").read_bytes(), 0).records
        assert (record.parameter_id, record.trial_job_id, record.sequence, record.value) == (
            i,
            f"t{i}",
            0,
            str(i),
        )


# ---- a trial that is prepared while another trial runs


def test_a_prepared_trial_writes_no_output_file_before_its_start(warm, site):
    site.write(
        "import os, sys\nprint(sys.argv[1:], os.environ['NAME'], os.getsid(0) == os.getpid(), __file__)"
    )
    start = site.warm_start("a", environ=CONTAINER | TRIAL | {"NAME": "mine"})
    warm.prepare(start)
    assert not start.stdout.exists()
    assert ended(warm.start(start)) == 0
    assert text_of(start.stdout) == f"['a'] mine True {site.folder}/train.py\n"


def test_a_prepared_trial_is_discarded_if_a_different_trial_starts(warm, site):
    site.write("import os, sys\nprint(sys.argv[1:], os.environ.get('NAME'))")
    other = site.warm_start("other", environ=CONTAINER | TRIAL | {"NAME": "its own"})
    for _ in range(3):
        warm.prepare(other)
    assert site.warmly(warm, "this") == (0, "['this'] None\n", "")
    waiting_fork(warm)


@pytest.mark.parametrize("after", ["print('new')", "print('old'", None])
def test_a_trial_runs_the_new_version_of_its_script_if_the_script_changes_after_the_preparation(
    warm, site, after
):
    site.write("print('old')")
    start = site.warm_start(python=sys.executable)
    warm.prepare(start)
    prepared_fork(warm)
    if after is None:
        (site.folder / "train.py").unlink()
    else:
        site.write(after)
    said = ended(warm.start(start)), text_of(start.stdout), text_of(start.stderr)
    assert said == site.plainly(sys.executable)


# The script prints whether the code object that it runs comes from the interpreter's cache.
IS_CACHED = """
import sys
frame = sys._getframe()
print({}, frame.f_back.f_globals["_code_cache"].code is frame.f_code, frame.f_code.co_filename)
"""


def runs_of(site, interpreter, script="train.py"):
    status, said, errors = site.warmly(interpreter, script=script)
    assert (status, errors) == (0, "")
    number, is_cached, path = said.split()
    # Python 3.8 shows the path as it is in the command line, where it may be relative.
    assert path in (script, str(site.folder / script))
    return int(number), is_cached == "True"


@pytest.mark.parametrize("python", each_of(PYTHONS))
def test_a_repeated_script_is_compiled_once_until_it_changes(warm_of, site, python):
    interpreter = warm_of("json", python=python)
    site.write(IS_CACHED.format(1))
    assert [runs_of(site, interpreter) for _ in range(4)] == [(1, False), (1, False), (1, True), (1, True)]
    site.write(IS_CACHED.format(2))
    assert [runs_of(site, interpreter)[0] for _ in range(3)] == [2, 2, 2]
    assert runs_of(site, interpreter) == (2, True)


@pytest.mark.parametrize(
    ("scripts", "cached"),
    [
        ("121212", "......"),  # no script runs twice in a row, so no script is cached
        ("1112111", "..*.***"),  # the rare script 2 does not replace the frequent script 1 in the cache
        ("11122211", "..*..*.."),
    ],
)
def test_the_code_cache_keeps_the_script_that_was_repeated_most_often(warm_of, site, scripts, cached):
    interpreter = warm_of("json")
    for number in set(scripts):
        site.write(IS_CACHED.format(number), f"{number}.py")
    assert [runs_of(site, interpreter, f"{number}.py") for number in scripts] == [
        (int(number), mark == "*") for number, mark in zip(scripts, cached, strict=True)
    ]


def test_a_script_is_never_cached_if_it_changes_every_time(warm_of, site):
    interpreter = warm_of("json")
    for number in range(4):
        site.write(IS_CACHED.format(number))
        assert runs_of(site, interpreter) == (number, False)


def test_a_script_above_the_size_limit_runs_without_being_cached(warm_of, site):
    interpreter = warm_of("json")
    site.write(IS_CACHED.format(1) + "#" * (1 << 20))
    assert [runs_of(site, interpreter) for _ in range(3)] == [(1, False)] * 3
    # This script is below the size limit, so it is cached even though it is larger than the buffer of a pipe.
    site.write(IS_CACHED.format(1) + "#" * (1 << 19))
    assert [runs_of(site, interpreter) for _ in range(3)] == [(1, False), (1, False), (1, True)]


@pytest.mark.parametrize("link", ["folder", "script"])
def test_a_symlink_is_resolved_again_if_it_changes_after_the_preparation_of_a_trial(warm, site, link):
    for version in ("old", "new"):
        site.write(f"value = '{version}'", f"{version}/helper.py")
        site.write("import helper, sys; print(helper.value, sys.path[0], __file__)", f"{version}/train.py")
    moved = site.folder / ("current" if link == "folder" else "train.py")

    def lead_to(version):
        moved.unlink(missing_ok=True)
        moved.symlink_to(version if link == "folder" else f"{version}/train.py")

    lead_to("old")
    start = replace(site.warm_start(), cwd=str(moved if link == "folder" else site.folder))
    warm.prepare(start)
    prepared_fork(warm)
    lead_to("new")
    assert ended(warm.start(start)) == 0
    shown = text_of(start.stdout), text_of(start.stderr)
    assert shown == site.plainly(sys.executable, cwd=start.cwd)[1:]
    assert shown[0].startswith(f"new {site.folder}/new ")


def test_the_error_for_a_deleted_code_folder_contains_the_path_of_the_folder(warm, site):
    site.write("print('here')", "sub/train.py")
    start = replace(site.warm_start(), cwd=str(site.folder / "sub"))
    warm.prepare(start)
    prepared_fork(warm)
    shutil.rmtree(site.folder / "sub")
    assert ended(warm.start(start)) == 1
    what = f"cannot enter the code folder {site.folder}/sub: No such file or directory"
    assert text_of(start.stderr) == f"{what}; check codeDir in the experiment file\n"


def test_a_cached_script_that_was_deleted_is_refused(warm_of, site):
    interpreter = warm_of("json")
    for _ in range(3):
        site.write("import os; os.unlink('train.py')")
        assert site.warmly(interpreter) == (0, "", "")
    with pytest.raises(WarmStartRefused, match=r"train\.py"):
        site.warmly(interpreter)
    site.write("print('there')")
    assert site.warmly(interpreter) == (0, "there\n", "")


def test_a_compiler_warning_of_a_script_is_printed_by_the_trial_but_not_by_its_preparation(warm_of, site):
    interpreter = warm_of("random")
    site.write("print(1 is 1)")
    start = site.warm_start()
    interpreter.prepare(start)
    prepared_fork(interpreter)
    assert not start.stderr.exists()
    assert ended(interpreter.start(start)) == 0
    assert text_of(start.stderr).count("SyntaxWarning") == 1


def test_a_start_with_a_killed_prepared_fork_is_refused_and_the_next_start_succeeds(warm, site):
    site.write("print('here')")
    start = site.warm_start()
    warm.prepare(start)
    fork = prepared_fork(warm)
    assert os.readlink(f"/proc/{fork.pid}/cwd") == str(site.folder)
    fork.kill()
    os.waitpid(fork.pid, 0)
    with pytest.raises(WarmStartRefused, match="died"):
        warm.start(start)
    assert site.warmly(warm)[:2] == (0, "here\n")


# ---- modules that are slow to import

TRAINS = """
import sys, threading
warm = {"numpy", "sklearn"} <= set(sys.modules)
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
x, rest, y, wanted = train_test_split(*load_digits(return_X_y=True), random_state=0)
score = LogisticRegression(max_iter=50, tol=1e-1).fit(x / 16, y).score(rest / 16, wanted)
a = np.random.default_rng(0).random((200, 200))
print(round(score, 6), round(float((a @ a).trace()), 3), np.linalg.matrix_rank(a), file=sys.stderr)
print(warm)
"""


def test_numpy_and_scikit_learn_compute_the_same_results_if_they_are_preloaded(warm_of, site):
    pytest.importorskip("sklearn")
    interpreter = warm_of("numpy", "sklearn.linear_model")
    site.write(TRAINS)
    _, _, wanted = site.plainly(sys.executable)
    for _ in range(2):
        assert site.warmly(interpreter) == (0, "True\n", wanted)
    assert psutil.Process(interpreter.pid).num_threads() == 1


# ---- a trial while it runs


def test_a_warm_trial_is_a_session_leader_and_a_child_of_the_keeper(warm, site):
    site.write("import os, sys\nos.mkfifo('gate')\nopen('gate').read()")
    pid = warm.start(site.warm_start())
    wait_until((site.folder / "gate").exists, "the script runs")
    process = psutil.Process(pid)
    assert process.ppid() == os.getpid()
    assert os.getpgid(pid) == os.getsid(pid) == pid
    os.killpg(pid, signal.SIGTERM)
    assert ended(pid) == -signal.SIGTERM


def test_trials_continue_after_their_interpreter_has_ended(site):
    interpreter = WarmInterpreter(sys.executable, (), CONTAINER)
    site.write("open('gate').read(); import sys; sys.exit(7)")
    os.mkfifo(site.folder / "gate")
    pid = interpreter.start(site.warm_start())
    interpreter.close()
    assert not psutil.pid_exists(interpreter.pid)
    (site.folder / "gate").write_text("go")
    assert ended(pid) == 7


def test_processes_started_by_a_preloaded_module_are_killed_with_the_interpreter(site):
    site.write(
        "import subprocess as s; pid = s.Popen(['sleep', '1000'], start_new_session=True).pid\n"
        "open(__file__ + '.pid', 'w').write(str(pid))",
        "starter.py",
    )
    environ = CONTAINER | {"PYTHONPATH": str(site.folder)}
    interpreter = WarmInterpreter(sys.executable, ("starter",), environ)
    with pytest.raises(WarmStartRefused, match=r"cannot preload starter: .* process\(es\) running \(sleep\)"):
        interpreter.is_ready(READY_S)
    assert ended(int((site.folder / "starter.py.pid").read_text())) == -signal.SIGKILL


def test_a_preloaded_module_is_accepted_if_its_child_processes_end_during_the_import(warm_of, site):
    site.write(
        "import subprocess\nended = subprocess.Popen(['true'])\nending = subprocess.Popen(['sleep', '0.05'])",
        "probing.py",
    )
    site.write("import probing; print(probing.ended.pid > 0)")
    path = {"PYTHONPATH": str(site.folder)}
    assert site.warmly(warm_of("probing", **path), environ=CONTAINER | path) == (0, "True\n", "")


def test_a_warm_interpreter_ends_when_its_keeper_ends(tmp_path):
    keeper = (
        "import os, sys; from trial_keeper.host.warm import WarmInterpreter\n"
        "w = WarmInterpreter(sys.executable, (), os.environ); assert w.is_ready(60); print(w.pid, flush=True); os._exit(0)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", keeper], stdout=subprocess.PIPE, check=True, timeout=DEADLINE_S
    ).stdout
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        # The interpreter is now an orphan that the test process has adopted, so ended() can wait for it.
        ended(int(shown))


# ---- refusals


def refused(*imports, python=sys.executable, **environ):
    interpreter = WarmInterpreter(python, imports, CONTAINER | environ)
    with contextlib.closing(interpreter):
        with pytest.raises(WarmStartRefused) as first:
            interpreter.is_ready(READY_S)
        with pytest.raises(WarmStartRefused) as second:
            interpreter.is_ready()
    assert str(second.value) == str(first.value)
    assert not psutil.pid_exists(interpreter.pid)
    return str(first.value)


THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='pump').start()"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (THREAD, "cannot preload guilty: its import leaves 1 thread(s) running (pump)"),
        (
            "import socket\nkept = socket.socket()",
            "cannot preload guilty: its import leaves files open (socket:[",
        ),
        (
            "import subprocess\nsubprocess.Popen(['sleep', '1000'])",
            "cannot preload guilty: its import leaves 1 process(es) running (sleep), which all trials would share",
        ),
        ("raise ValueError('no luck')", "cannot import guilty: ValueError: no luck; "),
        (
            "import no_such_thing",
            "cannot import guilty: ModuleNotFoundError: No module named 'no_such_thing'; ",
        ),
        ("import sys; sys.exit('enough')", "cannot import guilty: SystemExit: enough; "),
        ("def f(:", "cannot import guilty: "),
        (
            "import os; os.kill(os.getpid(), 9)",
            "the interpreter was ended by signal 9 while it imported guilty",
        ),
        ("import os; os._exit(3)", "the interpreter ended with code 3 while it imported guilty"),
    ],
)
def test_the_error_names_a_module_that_cannot_be_preloaded(tmp_path, source, words):
    (tmp_path / "guilty.py").write_text(source)
    (tmp_path / "innocent.py").touch()
    text = refused("random", "innocent", "guilty", PYTHONPATH=str(tmp_path))
    assert words in text
    assert "warmImports" in text or "plain" in text


def test_a_preloaded_module_that_initialises_cuda_is_refused(tmp_path):
    (tmp_path / "torch.py").write_text("class cuda:\n    is_initialized = staticmethod(lambda: True)")
    assert "its import initialises CUDA" in refused("torch", PYTHONPATH=str(tmp_path))


def test_a_thread_started_by_sitecustomize_is_reported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(THREAD)
    assert "its start leaves 1 thread(s) running (pump)" in refused(PYTHONPATH=str(tmp_path))


def test_the_error_names_a_missing_python_executable():
    with pytest.raises(
        WarmStartRefused, match=r"cannot start 'python3.99' as a warm interpreter: .*No such file"
    ):
        WarmInterpreter("python3.99", (), CONTAINER)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PYTHONPATH": "/x"}, "PYTHONPATH='/x'"),
        ({"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS"),
        ({"LANG": "C"}, "LANG='C'"),
    ],
)
def test_a_warm_start_with_a_different_startup_variable_is_refused(warm, site, environ, words):
    site.write("open('ran', 'w')")
    with pytest.raises(WarmStartRefused, match=words):
        warm.start(site.warm_start(environ=CONTAINER | TRIAL | environ))
    assert site.warmly(warm)[0] == 0


def test_a_warm_interpreter_refuses_an_argument_with_a_null_byte_and_then_runs_the_next_script(warm, site):
    site.write("import sys; print(sys.argv[1:])")
    with pytest.raises(WarmStartRefused, match="null byte"):
        site.warmly(warm, "a\0b")
    with pytest.raises(WarmStartRefused, match="ud800"):
        site.warmly(warm, "a\ud800b")
    assert site.warmly(warm, "", "b=c", "") == (0, "['', 'b=c', '']\n", "")


@pytest.mark.parametrize("missing", ["cwd", "script", "stdout"])
def test_a_refused_warm_start_runs_no_script_and_the_next_start_succeeds(warm, site, missing):
    site.write("open('ran', 'w')")
    start = site.warm_start(script="none.py" if missing == "script" else "train.py")
    folder = site.folder / "none" if missing == "cwd" else site.folder
    stdout = site.folder / "none" / "out" if missing == "stdout" else start.stdout
    with pytest.raises(WarmStartRefused, match="none"):
        warm.start(WarmStart(start.command, str(folder), start.environ, stdout, start.stderr))
    assert not (site.folder / "ran").exists()
    assert site.warmly(warm) == (0, "", "")
    assert (site.folder / "ran").exists()
    waiting_fork(warm)


def test_the_refusal_of_a_start_by_a_dead_warm_interpreter_names_the_signal_that_killed_the_interpreter(site):
    interpreter = WarmInterpreter(sys.executable, (), CONTAINER)
    assert interpreter.is_ready(READY_S)
    os.kill(interpreter.pid, signal.SIGKILL)
    os.waitid(os.P_PID, interpreter.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        with pytest.raises(WarmStartRefused, match="was ended by signal 9 while it waited for a trial"):
            interpreter.start(site.warm_start())
    interpreter.close()


def test_a_warm_start_is_refused_if_the_keeper_process_does_not_adopt_orphans(tmp_path):
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    before = set(psutil.Process().children())
    keeper = (
        "import os, sys; from pathlib import Path; from trial_keeper.host.warm import *\n"
        "w = WarmInterpreter(sys.executable, (), os.environ); d = Path(sys.argv[1])\n"
        "try:\n    w.start(WarmStart(WarmCommand('python', 'train.py'), str(d), os.environ, d / 'o', d / 'e'))\n"
        "except WarmStartRefused as error:\n    print(error)\nw.close()"
    )
    shown = subprocess.run(
        [sys.executable, "-c", keeper, tmp_path], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert "does not adopt orphans" in shown.stdout, shown
    # The test process has adopted the orphans of the keeper, so ended() can wait for them.
    for child in set(psutil.Process().children()) - before:
        ended(child.pid)
    assert not (tmp_path / "ran").exists()


# ---- forks of the interpreter

EXITS_ARE_NOTED = "import atexit, os\natexit.register(lambda: open(os.environ['EXITS'], 'a').write('x'))"
NO_FORK_IN_CHILDREN = """
import errno, os
interpreter, fork = os.getpid(), os.fork

def limited():
    if os.getpid() != interpreter:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()

os.fork = limited
"""


def test_a_standby_fork_does_not_run_the_exit_functions_of_a_warm_module(site):
    site.write(EXITS_ARE_NOTED, "noted.py")
    exits = site.folder / "exits"
    exits.touch()
    environ = CONTAINER | {"PYTHONPATH": str(site.folder), "EXITS": str(exits)}
    interpreter = WarmInterpreter(sys.executable, ("noted",), environ)
    with contextlib.closing(interpreter):
        assert interpreter.is_ready(READY_S)
        waiting_fork(interpreter)
        assert exits.read_text() == ""
        site.write("print('here')")
        assert site.warmly(interpreter, environ=environ | TRIAL)[:2] == (0, "here\n")
        assert exits.read_text() == "x"


def test_a_warm_start_is_refused_with_the_reason_if_the_system_refuses_a_fork(site):
    site.write(NO_FORK_IN_CHILDREN, "limited.py")
    environ = CONTAINER | {"PYTHONPATH": str(site.folder)}
    interpreter = WarmInterpreter(sys.executable, ("limited",), environ)
    with contextlib.closing(interpreter):
        assert interpreter.is_ready(READY_S)
        with pytest.raises(WarmStartRefused, match="Resource temporarily unavailable; raise the limits on"):
            interpreter.start(site.warm_start(environ=environ | TRIAL))


@pytest.mark.parametrize("stdout", ["full", "writable"])
@pytest.mark.parametrize("python", each_of(PYTHONS))
def test_output_of_finalizers_in_a_fork_has_the_same_effect_as_in_a_new_process(
    warm_of, site, python, stdout
):
    full = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n" if stdout == "full" else ""
    site.write(
        f"import os, sys\n{full}class A:\n    def __del__(self):\n        print('late')\na = A()\nsys.exit(3)"
    )
    environ = CONTAINER | {"NNI_PLATFORM": "local"}  # without PYTHONUNBUFFERED, output is buffered
    alone = site.plainly(python, environ=environ)
    assert alone == (3, "" if full else "late\n", "")
    assert site.warmly(warm_of(python=python), python=python, environ=environ) == alone
