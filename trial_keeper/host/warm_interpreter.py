"""The fork server of warm starts. The user's own Python runs this file, so it is self-contained: standard library, 3.8.

This file is not split despite its length: a trial must have the modules of a plain start, so `sys.modules` may contain no part
of the keeper.

Theory of operation. The keeper starts `python -u warm_main.py DESCRIPTOR module…`, which runs this file. It imports the modules
and inspects the process after each import: a thread, a child, an open descriptor or an initialised GPU does not survive a fork,
so the module is refused by name. From then on there is always one more fork than trials, the standby fork. The standby fork waits
on the keeper's channel in place of the interpreter, so that no trial waits for a fork. While idle it writes to the shared memory
pages that a trial's start writes to, so that they are copied in advance. The interpreter forks twice, and the process in between
exits at once. So the standby fork is a child of the keeper, which adopts orphans and gets the exact exit status from the kernel.
The request may arrive while the previous trial still runs. The standby fork then sets itself up, reports so, and waits for the
keeper's start command, which carries stdout and stderr. Then `_serve` returns in the fork, and the script runs from this file's
last lines. The script ends as any script of Python does: with SystemExit, tracebacks, threads, atexit and unflushed files.
The interpreter forks the next standby fork as soon as the current fork is set up.

On the channel the keeper first sends one byte, which permits the imports. Every later message is a length of four bytes and
that many bytes. The interpreter sends JSON objects: `importing` (a module), `ready`, `refused` (a text; `died` is the pid of the
standby fork that caused it), `prepared` (a pid). The keeper sends one request per trial (see `_Request`). It is not JSON, because
parsing JSON doubles the number of pages that a fork copies. One descriptor comes with it: the socket for the start command, which
is a byte with the descriptors of stdout and stderr. The fork replies with one byte once it has its own session.

The interpreter compiles a script that runs repeatedly, and its forks inherit the code.
"""

from __future__ import annotations

# The namespace that this version of Python gives to any script: the initial `__main__` of a trial.
_PRISTINE_MAIN = dict(globals())
del _PRISTINE_MAIN["annotations"]  # set by the import above

import sys  # noqa: E402 - the lines above must come first

if __name__ == "__main__":
    import os

    # Python puts a script's folder first on its path; the user's modules must not import from this folder.
    if sys.path and sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]

import _io  # noqa: E402
import _thread  # noqa: E402
import array  # noqa: E402
import atexit  # noqa: E402
import contextlib  # noqa: E402
import fcntl  # noqa: E402, F401 - the first report of each fork needs it
import gc  # noqa: E402
import io  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
import weakref  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Collection, Iterator, NoReturn

_TASKS = "/proc/self/task"
# The kernel removes the task entry of a joined thread with a short delay.
_MAX_FORGETTING_S = 0.5
_HEADER_BYTES = 4
_READ_BYTES = 64 * 1024
# Relative entries of PYTHONPATH were resolved against this folder when Python started.
_own_folder = os.getcwd()
# The start command carries two descriptors, a request carries one.
_DESCRIPTORS = 2
# A trial's reply to the keeper once it is in its own session.
_HAS_LEFT = b"l"
# A single fork may be killed for its memory; this many deaths in a row have a permanent cause.
_MAX_DEATHS = 3
_PREFAULTED = object()
# A standby fork's reports that its script is not to be cached, or is cached already. No path starts with a null byte.
_NOT_CACHEABLE, _CACHE_HIT = b"\0-", b"\0="
# The source of a longer script would occupy the interpreter's memory while it compiles.
_MAX_CACHED_BYTES = 1 << 20
# The typical number of variables that a trial's request changes.
_VARIABLES_PREFAULTED = 8


# ---- the channel


def _send(channel: socket.socket, **message: Any) -> None:
    data = json.dumps(message).encode("ascii")
    channel.sendall(len(data).to_bytes(_HEADER_BYTES, "big") + data)


class _Request:
    """A trial to start. Its environment is a difference to the interpreter's own: NAME=VALUE entries, and names to unset.

    On the channel these are fields separated by null bytes. The first field holds four numbers: the counts of argv, orig_argv and
    names to unset, and 1 if output is unbuffered. Then come the working directory, those three lists, and the variables.
    """

    def __init__(self, data: bytes) -> None:
        counts, self.cwd, *words = data.split(b"\0")
        argv, orig_argv, unset, is_unbuffered = map(int, counts.split())
        self.is_unbuffered = bool(is_unbuffered)
        self.argv, self.orig_argv = words[:argv], words[argv : argv + orig_argv]
        self.unset = words[argv + orig_argv : argv + orig_argv + unset]
        self.environ = words[argv + orig_argv + unset :]


def _receive(channel: socket.socket) -> tuple[_Request, list[int]]:
    """Return the next request. Ends the process on EOF, which signals the keeper's death."""
    data, descriptors = _receive_descriptors(channel, _HEADER_BYTES)
    data += _exactly(channel, _HEADER_BYTES - len(data))
    return _Request(_exactly(channel, int.from_bytes(data, "big"))), descriptors


def _receive_descriptors(channel: socket.socket, size: int) -> tuple[bytes, list[int]]:
    space = socket.CMSG_SPACE(_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, _, _ = channel.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    return data, descriptors.tolist()


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = channel.recv(size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


# ---- a pristine process


def _import(name: str, channel: socket.socket) -> str | None:
    """Import a module. Returns the reason why the module cannot be preloaded, or None."""
    remedy = f"remove {name} from warmImports"
    try:
        __import__(name)
    except BaseException as error:  # noqa: BLE001 - any failure is reported, SystemExit too
        import traceback  # not at the top: its 260 kB would be in each fork

        cause = "".join(traceback.format_exception_only(type(error), error)).strip()
        return f"cannot import {name}: {cause}; install it for {sys.executable}, or {remedy}"
    found = _impurity(channel)
    return found and f"cannot preload {name}: its import {found}; {remedy}"


def _impurity(channel: socket.socket) -> str | None:
    """Describe a part of this process that does not survive a fork, as the end of a sentence; None if there is none."""
    if _cuda_is_initialised():
        return _USES_CUDA
    found = _impurity_of(_open_files(channel))
    if found is not None:
        return found
    threads = _threads()
    if threads:
        return f"leaves {len(threads)} thread(s) running ({', '.join(threads)}), which do not survive a fork"
    processes = _remaining(_children)
    if processes:
        return f"leaves {len(processes)} process(es) running ({', '.join(processes)}), which all trials would share"
    return None


_USES_CUDA = "initialises CUDA, which does not survive a fork"


def _impurity_of(opened: list[str]) -> str | None:
    if any(target.startswith(("/dev/nvidia", "/dev/kfd")) for target in opened):
        return _USES_CUDA
    # Other devices have no shared file offset.
    shared = [target for target in opened if not target.startswith("/dev/")]
    return f"leaves files open ({', '.join(shared)}), which all trials would share" if shared else None


def _threads() -> list[str]:
    """Return the names of the threads that run in this process when it forks, without the current one.

    Libraries with fork support, such as the OpenBLAS of numpy and scipy, end their threads before each fork and restart them on
    the next use. So if there are threads, this function first forks a process that does nothing.
    """
    if len(os.listdir(_TASKS)) == 1:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads, which this function detects itself
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    names = []
    for task in sorted(_remaining(lambda: set(os.listdir(_TASKS)) - {str(os.getpid())}), key=int):
        try:
            with open(f"{_TASKS}/{task}/comm") as file:
                names.append(_python_name(int(task)) or file.read().strip())
        except OSError:  # the thread ended
            continue
    return names


def _remaining(found: Callable[[], Collection[str]]) -> Collection[str]:
    """Return the names from `found` once none is left, or after a short time: a thread or process may be about to end."""
    deadline_s = time.monotonic() + _MAX_FORGETTING_S
    while True:
        names = found()
        if not names or time.monotonic() > deadline_s:
            return names
        time.sleep(0.001)


def _children() -> list[str]:
    """Return the names of this process's children that have not ended, as far as the kernel reports them."""
    names = []
    for task in os.listdir(_TASKS):
        with contextlib.suppress(OSError):  # not every kernel reports children
            with open(f"{_TASKS}/{task}/children") as file:
                children = file.read().split()
            for pid in children:
                with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
                    # The name is in brackets and may contain any character. Source: proc_pid_stat(5).
                    name, _, rest = file.read().partition(" (")[2].rpartition(") ")
                    if rest[:1] not in ("Z", "X"):
                        names.append(name)
    return names


def _python_name(native_id: int) -> str | None:
    threading = sys.modules.get("threading")
    threads = threading.enumerate() if threading is not None else []
    return next((str(thread.name) for thread in threads if thread.native_id == native_id), None)


def _open_files(channel: socket.socket) -> list[str]:
    """Return the open files except the standard three and the channel, as the kernel names them."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != channel.fileno():
            try:
                targets.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:  # the descriptor of the listing itself
                continue
    return targets


def _cuda_is_initialised() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


# ---- a trial


def _serve() -> tuple[str, Any]:
    """Start trials until the keeper is gone. Returns only in a trial's process: the script's path, and its source or code."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    # The keeper permits the imports once it has registered this process. EOF ends this process.
    _exactly(channel, 1)
    names = sys.argv[2:]
    del sys.argv[1:]
    _become_ready(channel, names)
    _send(channel, ready=sys.executable)
    deaths = 0
    while True:
        found = _late_impurity()
        if found is not None:
            _refuse_next(
                channel, f"cannot start a trial warm: the interpreter {found}; the trial gets a plain start"
            )
            continue
        reader, writer = os.pipe()
        problem = _fork_twice()
        if problem is None:
            os.close(reader)
            return _run_child(channel, writer)
        os.close(writer)
        report = _read_and_close(reader)  # until EOF: the standby fork has reported, or is dead
        number, _, answer = report.partition(b"\0")
        deaths = 0 if report else deaths + 1
        if _waiting(channel) == b"":  # EOF
            os._exit(0)
        if problem:
            _refuse_next(channel, problem)
        elif answer:
            _code_cache.note(answer)
        elif report:
            # The fork died before its report; only the keeper can tell whether the fork had accepted a request.
            text = "cannot start a trial warm: its fork died at once; the trial gets a plain start"
            _send(channel, refused=text, died=int(number))
        elif deaths >= _MAX_DEATHS:
            _refuse_next(
                channel,
                f"cannot start a trial warm: {deaths} forks of the interpreter died while idle; the trial gets a plain start",
            )


def _become_ready(channel: socket.socket, names: list[str]) -> None:
    """Import the modules, and do the work that the first fork would otherwise do."""
    environ = dict(os.environb)
    if sys.version_info < (3, 8):  # noqa: UP036 - reports an older version
        _refuse(
            channel,
            f"cannot use {sys.executable} for warm starts: it is older than Python 3.8; remove warmImports",
        )
    found = _impurity(channel)
    if found is not None:
        _refuse(
            channel, f"cannot use {sys.executable} for warm starts: its start {found}; remove warmImports"
        )
    for name in names:
        _send(channel, importing=name)
        reason = _import(name, channel)
        if reason is not None:
            _refuse(channel, reason)
    _SHARED_IDS.update(map(id, sys.modules.values()))
    # A trial's environment is the interpreter's original one plus the changes of its request.
    os.environb.clear()
    os.environb.update(environ)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    for _ in _prefault():
        continue
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page that holds an object


def _refuse_next(channel: socket.socket, text: str) -> None:
    """Refuse the next request in the interpreter itself, as no standby fork exists."""
    for descriptor in _receive(channel)[1]:
        os.close(descriptor)
    _send(channel, refused=text)


def _waiting(channel: socket.socket) -> bytes | None:
    """Peek at the first byte to be received; empty at EOF, None if nothing has arrived yet."""
    try:
        return channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


_SAMPLE = """
class Thing:
    def value(self, a, b=2):
        return [i + b for i in range(a)]
print(f"{1 / 3:.1f}", *Thing().value(3), file=file, flush=True)
"""


def _prefault() -> Iterator[None]:
    """Do what each trial does, in steps, to bind functions, fill caches and allocate memory in advance.

    In the interpreter, before the forks, this saves a third of a short trial's processor time. In an idle standby fork it
    prefaults the copy-on-write pages. It leaves the state unchanged.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _stream(number, name, getattr(sys, name), is_buffered=False)
    yield
    main = type(sys)("__main__")
    vars(main).update(_PRISTINE_MAIN)
    vars(main).update(file=io.StringIO())
    exec(compile(_SAMPLE, "sample", "exec", dont_inherit=True), vars(main))
    del main
    gc.collect()  # the garbage must not be visible to a trial
    yield
    _modules_so_far()
    _are_flushed()
    variables = [b"%b=%b" % pair for pair in itertools.islice(os.environb.items(), _VARIABLES_PREFAULTED)]
    _set_variables(_Request(b"\0".join((b"0 0 0 0", b"/", *variables))))
    yield
    with contextlib.suppress(OSError):  # the running trial may remove the folder
        os.path.dirname(os.path.realpath(os.path.abspath(os.path.join(os.getcwd(), "script"))))


def _prefault_until_called(channel: socket.socket, steps: Iterator[None]) -> None:
    """Prefault until a message arrives or all steps are done: short trials must not wait for the rest."""
    while _waiting(channel) is None and next(steps, _PREFAULTED) is not _PREFAULTED:
        continue


def _refuse(channel: socket.socket, text: str) -> NoReturn:
    """Report the refusal and wait. The keeper finds processes that the modules started as long as this process exists."""
    _send(channel, refused=text)
    while True:
        _exactly(channel, 1)  # ends the process once the keeper closes the channel


def _late_impurity() -> str | None:
    """Like `_impurity`, at the time of a fork: a module may start a thread long after its import."""
    if _cuda_is_initialised():
        return "has initialised CUDA"
    threads = _threads()
    return f"runs {len(threads)} thread(s) now ({', '.join(threads)})" if threads else None


def _fork_twice() -> str | None:
    """Create the standby fork as a child of the process that adopts orphans.

    Returns None in the fork. Returns the problem, or an empty string, in the interpreter once the fork exists.
    """
    adopted, hold = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        os.close(adopted)
        os.close(hold)
        return _not_forked(error)
    if between == 0:
        try:
            spare = os.fork()
        except OSError as error:
            os._exit(error.errno or 1)
        if spare:
            os._exit(0)
        os.close(hold)
        os.read(adopted, 1)  # until EOF
        os.close(adopted)
        return None
    os.close(adopted)
    status = os.waitpid(between, 0)[1]
    os.close(hold)
    number = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    return _not_forked(OSError(number, os.strerror(number))) if number else ""


def _not_forked(error: OSError) -> str:
    return f"cannot fork the warm interpreter: {error.strerror}; raise the limits on memory and processes"


def _run_child(channel: socket.socket, parent: int) -> tuple[str, Any]:
    """Wait for a request and turn this fork into the requested process, once the keeper commands its start."""
    steps = _prefault()
    _prefault_until_called(channel, steps)
    request, (descriptor,) = _receive(channel)
    _write(parent, b"%d\0" % os.getpid())
    command = socket.socket(fileno=descriptor)
    message: dict[str, Any] = {"prepared": os.getpid()}
    source, code, answer = b"", None, _NOT_CACHEABLE
    untouched, place = sys.path[:], ("", "")
    script = os.fsdecode(request.argv[0])
    try:
        _set_up(request)
        place = _set_path(script)
        source = _source_of(script)
        path = _path_of(script)
        code = _code_cache.code_of(path, source)
        answer = _code_cache.answer(path, source, code)
    except OSError as error:
        where = os.fsdecode(error.filename or script)
        message["refused"] = (
            f"cannot start a trial warm: cannot read {where}: {error.strerror}; the trial gets a plain start"
        )
    _send(channel, **message)
    channel.close()
    _write(parent, answer)
    # The next standby fork is forked now, to be ready for the trial after this one.
    os.close(parent)
    _prefault_until_called(command, steps)
    # EOF: the keeper is gone or no longer needs this fork.
    is_started, descriptors = _receive_descriptors(command, 1)
    if "refused" in message or not is_started:
        os._exit(1)
    # Not before: until here the fork belongs to the interpreter, not to the trial that ran meanwhile.
    os.setsid()
    _write(command.fileno(), _HAS_LEFT)
    command.close()
    _take_stdio(descriptors, is_buffered=not request.is_unbuffered)
    try:
        os.chdir(request.cwd)  # the previous trial may have recreated it
        has_moved = _has_moved(script, place)
    except OSError as error:
        what = f"cannot enter the code folder {os.fsdecode(request.cwd)}: {error.strerror}"
        print(f"{what}; check codeDir in the experiment file", file=sys.stderr, flush=True)
        os._exit(1)
    if has_moved:
        sys.path[:], code = untouched, None
        _set_path(script)
    program = _up_to_date(script, source, code)
    return script, program


def _write(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reader is gone, but this trial continues
        os.write(descriptor, data)


def _set_up(request: _Request) -> None:
    """Do the preparation that is independent of the script and possible before the start command."""
    stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(stdin, 0)
    os.close(stdin)
    os.chdir(request.cwd)
    _set_variables(request)
    sys.argv[:] = map(os.fsdecode, request.argv)
    if sys.version_info >= (3, 10):
        sys.orig_argv = [os.fsdecode(word) for word in request.orig_argv]
    for module in ("random", "numpy.random"):
        if module in sys.modules:
            sys.modules[module].seed()


def _set_variables(request: _Request) -> None:
    for name in request.unset:
        os.environb.pop(name, None)
    for entry in request.environ:
        name, _, value = entry.partition(b"=")
        os.environb[name] = value


def _source_of(script: str) -> bytes:
    return _read_and_close(os.open(script, os.O_RDONLY | os.O_CLOEXEC))


def _read_and_close(descriptor: int) -> bytes:
    """Return the whole content of a file or a pipe; os.read avoids the extra system calls that open() makes."""
    try:
        data = piece = os.read(descriptor, _READ_BYTES)
        while piece:
            piece = os.read(descriptor, _READ_BYTES)
            data += piece
        return data
    finally:
        os.close(descriptor)


def _path_of(script: str) -> str:
    """The script's path as Python shows it: absolute since 3.9, unchanged before."""
    return os.path.join(os.getcwd(), script) if sys.version_info >= (3, 9) else script


class _CodeCache:
    """Code cache for a script that runs repeatedly; each standby fork inherits the cache.

    All input of the cache comes from standby forks: only they open the user's files.
    """

    script = last = _NO_SCRIPT = ("", b"")
    """Path (as Python shows it) and source: of the cached script, and of the script that the last standby fork compiled."""
    code: Any = None

    def code_of(self, path: str, source: bytes) -> Any:
        """Return the cached code, or compile it like `_compiled`, which is slow."""
        return self.code if self.script == (path, source) else _compiled(path, source)

    def answer(self, path: str, source: bytes, code: Any) -> bytes:
        """Return a standby fork's report on its script, for `note`; never empty."""
        if code is None or len(source) > _MAX_CACHED_BYTES:
            return _NOT_CACHEABLE
        return _CACHE_HIT if code is self.code else b"%b\0%b" % (os.fsencode(path), source)

    def note(self, answer: bytes) -> None:
        """Compile the script for all later forks if two standby forks in a row had to compile the same script."""
        if answer in (_NOT_CACHEABLE, _CACHE_HIT):
            self.last = self._NO_SCRIPT
            return
        path, _, source = answer.partition(b"\0")
        before, self.last = self.last, (os.fsdecode(path), source)
        if before == self.last:
            self.script, self.code = self.last, _compiled(*self.last)


_code_cache = _CodeCache()


def _compiled(path: str, source: bytes) -> Any:
    """The script, ready to run; None if compiling raises or warns, which Python then reports when the trial runs."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            code = compile(source, path, "exec", dont_inherit=True)
    except Exception:  # noqa: BLE001 - Python raises and reports it again
        return None
    return None if caught else code


def _up_to_date(script: str, source: bytes, code: Any) -> Any:
    """Return the program to run at the trial's start: the code, or the new source if the script has changed."""
    try:
        now = _source_of(script)
    except OSError as error:
        # Python's own wording.
        what = f"can't open file {_path_of(script)!r}: [Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: {what}", file=sys.stderr, flush=True)
        os._exit(2)
    return code if code is not None and now == source else now


def _take_stdio(descriptors: list[int], *, is_buffered: bool) -> None:
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, name, getattr(sys, name), is_buffered=is_buffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _set_path(script: str) -> tuple[str, str]:
    """Set `sys.path` as `python script` has it. Returns the working directory and the script's real path.

    The interpreter has resolved relative entries of PYTHONPATH against its own folder.
    """
    entries = os.environ["PYTHONPATH"].split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    moved = {
        os.path.abspath(os.path.join(_own_folder, entry)): os.path.abspath(entry)
        for entry in entries
        if not os.path.isabs(entry)
    }
    sys.path[:] = [moved.get(path, path) for path in sys.path]
    real = os.path.realpath(script)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(real))
    return os.getcwd(), real


def _has_moved(script: str, place: tuple[str, str]) -> bool:
    """True if a link has changed since `_set_path` returned `place`: in the path of the folder, or below it to the script."""
    cwd, real = place
    if os.getcwd() != cwd:
        return True
    has_links = os.path.join(cwd, os.path.normpath(script)) != real
    return has_links and os.path.realpath(script) != real


def _stream(number: int, name: str, like: Any, *, is_buffered: bool) -> io.TextIOWrapper:
    """Create a standard stream over its descriptor as Python does at start, with the encoding of `like`.

    Source: CPython, create_stdio in Python/pylifecycle.c.
    """
    is_output = number > 0
    file: Any = open(  # noqa: SIM115 - open as long as the trial
        number, "wb" if is_output else "rb", -1 if is_buffered or not is_output else 0, closefd=False
    )
    raw = getattr(file, "raw", file)
    raw.name = f"<{name}>"
    # Since 3.9 stderr is line-buffered, even in a file.
    by_line = is_buffered and (raw.isatty() or (name == "stderr" and sys.version_info >= (3, 9)))
    stream = io.TextIOWrapper(
        file, like.encoding, like.errors, newline="\n", line_buffering=by_line, write_through=not is_buffered
    )
    stream.mode = "w" if is_output else "r"  # type: ignore[misc]
    return stream


def _fresh_main(script: str) -> str:
    """Install a new `__main__` for the script. Returns the script's path as Python shows it."""
    path = _path_of(script)
    main = type(sys)("__main__")
    namespace = vars(main)
    namespace.update(_PRISTINE_MAIN)
    namespace.update(
        __doc__=None, __file__=path, __loader__=type(_PRISTINE_MAIN["__loader__"])("__main__", path)
    )
    if "__annotations__" in namespace:
        namespace["__annotations__"] = {}
    sys.modules["__main__"] = main
    return path


def _hide_this_file(error: BaseException) -> None:
    """Show the error without this file's frame in its traceback."""
    hook = getattr(sys, "excepthook", sys.__excepthook__)
    own = error.__traceback__
    shown = own and own.tb_next

    def show(kind: type[BaseException], value: BaseException, _: object) -> None:
        sys.excepthook = hook
        sys.last_traceback = shown
        hook(kind, value.with_traceback(shown), shown)

    sys.excepthook = show


# ---- the end

try:
    import ctypes

    # Not os._exit: exit handlers of C libraries must run. PyDLL, not CDLL, keeps the GIL, so that no other thread runs meanwhile.
    _exit: Any = ctypes.PyDLL(None).exit
except (ImportError, OSError, AttributeError):  # a Python built without ctypes
    _exit = None
_exit_code: int | None = None


@atexit.register
def _end_at_once() -> None:
    """End a trial as Python does, but keep the objects that it shares with the interpreter: freeing them would copy every page.

    This function is registered first, so it runs last: after the joins of threads and all other exit functions. The trial's own
    modules are destroyed as usual, with the deletions and flushes that follow. If Python would report something, this function
    returns and Python does the rest.
    """
    # A remaining thread would use destroyed modules; only Python can stop that thread before.
    if _exit is None or _exit_code is None or _thread._count() or not _are_flushed():
        return
    own = _own_modules()
    if own is None:
        return
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    # io.IOBase gives the same result, hundreds of times slower.
    kinds = (_io._IOBase, sys.modules["_pyio"].IOBase) if "_pyio" in sys.modules else _io._IOBase
    # As Python does: collect before the modules are removed, and flush a file before its target is closed.
    gc.collect()
    gone = [sys.modules.pop(name) for name in own if type(sys.modules.get(name)) is type(sys)]
    # The trial may have bound a shared module to a second name.
    left = [weakref.ref(module) for module in gone if id(module) not in _SHARED_IDS]
    del gone
    gc.collect()
    for reference in reversed(left):
        module = reference()
        if module is not None:
            _clear(vars(module))
            del module
    gc.collect()
    for found in gc.get_objects():
        if issubclass(type(found), kinds):
            try:
                if not found.closed:
                    found.flush()
            except Exception:  # noqa: BLE001 - Python reports nothing here, either
                pass
    _exit(_exit_code)


_SHARED_IDS: set[int] = set()
_shared: tuple[str, Any, int] = ("", None, 0)


def _modules_so_far() -> tuple[str, Any, int]:
    """Name and module of the newest import, and the number of modules. Iterating over all would copy their names' pages."""
    name = next(reversed(sys.modules))
    return name, sys.modules[name], len(sys.modules)


def _own_modules() -> list[str] | None:
    """Return the modules that the trial itself has imported, in order; None if that can no longer be determined."""
    last, module, count = _shared
    if type(sys.modules) is not dict or sys.modules.get(last) is not module:
        return None
    newest_first = list(itertools.takewhile(lambda name: name != last, reversed(sys.modules)))
    if len(sys.modules) - len(newest_first) != count:
        return None  # a shared module was removed or imported again
    return [*(["__main__"] if "__main__" in sys.modules else []), *reversed(newest_first)]


def _are_flushed() -> bool:
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except Exception:  # noqa: BLE001 - Python raises and reports it again
        return False
    return True


def _clear(namespace: dict[str, Any]) -> None:
    """Clear a module's namespace, names with one underscore first.

    Source: CPython, _PyModule_ClearDict.
    """
    for is_private in (True, False):
        for name in list(namespace):
            if (name.startswith("_") and not name.startswith("__")) is is_private and name != "__builtins__":
                namespace[name] = None


def _code_of(error: BaseException) -> int | None:
    """Return the exit code after this error; None if Python does more than exit."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF if type(error.code) is int else 1
    return (
        1 if isinstance(error, Exception) and getattr(sys, "excepthook", None) is sys.__excepthook__ else None
    )


if __name__ == "__main__":
    _own_code = sys._getframe().f_code  # kept: freeing it would copy the pages that it holds
    _script, _program = _serve()
    _shared = _modules_so_far()
    _path = _fresh_main(_script)
    try:
        # The namespace has no name in this file: a reference would keep the script's objects alive at the end.
        if isinstance(_program, bytes):
            _program = compile(_program, _path, "exec", dont_inherit=True)
        exec(_program, vars(sys.modules["__main__"]))
        _exit_code = 0
    except BaseException as _error:
        _exit_code = _code_of(_error)
        if not isinstance(_error, SystemExit):
            _hide_this_file(_error)
        raise
