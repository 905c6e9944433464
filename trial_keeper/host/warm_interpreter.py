"""The interpreter's half of a warm start. The user's own Python runs this file, so it stands alone: standard library, 3.8.

Theory of operation. The keeper starts `python -u warm_main.py DESCRIPTOR module…`, which runs this file. The modules are
imported, and after each of them the process is looked at: a thread, a child, an open descriptor or an initialised GPU cannot be
given to a fork, so the module is refused by name. From then on there is one fork more than there are trials, the spare: it
waits on the keeper's channel in the interpreter's place, so that no trial waits for a fork, and as long as nobody wants it
copies what a trial's start writes to of the memory that they share. It was forked twice, and the process between ended at
once, so that it is a child of the keeper, which adopts orphans, and the keeper learns the trial's exact end from the kernel.
With its request, which may come while the trial before still runs, the spare sets itself up, says so, and waits for the
keeper's word, with which come stdout and stderr; then `_serve` returns in it: the script runs on top of this file's last
lines, and its end is the interpreter's own end, with all that Python does then (SystemExit, tracebacks, threads, atexit,
unflushed files). The interpreter forks the next spare as soon as one has set itself up.

On the channel each message is four bytes of length and what they count. To the keeper a JSON object: `importing` (a module),
`ready`, `refused` (a text; `died` is the pid of a spare that is the reason), `prepared` (a pid). From the keeper one request per
trial (see `_Request`), which is no JSON, because to read that costs a fork twice as many pages; with it comes one descriptor: the
socket over which comes the keeper's word, a byte with the descriptors of stdout and stderr. A byte comes back once the trial has
a session of its own.

A script that is run again and again is compiled in the interpreter, and its forks have the code from their beginning.
"""

from __future__ import annotations

_BLANK_MAIN = dict(
    globals()
)  # what this version of Python gives any script: the trial's own `__main__` begins so
del _BLANK_MAIN["annotations"]  # but for the line above

import sys  # noqa: E402 - the lines above have to be the first

if __name__ == "__main__":
    import os

    # A script's folder is first on its path. Nothing in this one is for the user's modules to find.
    if sys.path and sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]

import _io  # noqa: E402
import _thread  # noqa: E402
import array  # noqa: E402
import atexit  # noqa: E402
import contextlib  # noqa: E402
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
    from typing import Any, Iterator, NoReturn

_TASKS = "/proc/self/task"
# The kernel takes a moment to forget a thread that was joined.
_LONGEST_FORGETTING_S = 0.5
_HEADER_BYTES = 4
_READ_BYTES = 64 * 1024
# The one that a relative PYTHONPATH was taken from, when Python started.
_own_folder = os.getcwd()
# With the keeper's word; with a request there is one.
_DESCRIPTORS = 2
# What a trial tells the keeper: it is in a session of its own.
_HAS_LEFT = b"l"
# One may be killed for its memory; when so many are, one after the other, there is a reason that stays.
_MOST_DEATHS = 3
_REHEARSED = object()
# What a spare tells of a script that the interpreter is not to hold, and of one that it holds already. No path begins so.
_UNFIT, _WAS_HELD = b"\0-", b"\0="
# Of a longer one the source would go to the interpreter for as long as it takes to compile.
_LONGEST_HELD_BYTES = 1 << 20
# A trial's request changes about so many.
_VARIABLES_REHEARSED = 8


# ---- the channel


def _send(channel: socket.socket, **message: Any) -> None:
    data = json.dumps(message).encode("ascii")
    channel.sendall(len(data).to_bytes(_HEADER_BYTES, "big") + data)


class _Request:
    """A trial to start, of whose environment it has the difference to the interpreter's own: NAME=VALUE, and names to unset.

    On the channel these are words with a null byte between two. The first tells how many of them are argv, orig_argv and names to
    unset, and whether output is unbuffered, as numbers; then come the folder to be in, those three, and the variables.
    """

    def __init__(self, data: bytes) -> None:
        counts, self.cwd, *words = data.split(b"\0")
        argv, orig_argv, unset, is_unbuffered = map(int, counts.split())
        self.is_unbuffered = bool(is_unbuffered)
        self.argv, self.orig_argv = words[:argv], words[argv : argv + orig_argv]
        self.unset = words[argv + orig_argv : argv + orig_argv + unset]
        self.environ = words[argv + orig_argv + unset :]


def _receive(channel: socket.socket) -> tuple[_Request, list[int]]:
    """The next request. Ends the process when the keeper is gone: that is how it learns so."""
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
    """Import a module; why it cannot be held, or None."""
    way_out = f"take {name} out of warmImports"
    try:
        __import__(name)
    except BaseException as error:  # noqa: BLE001 - whatever stops it, SystemExit too, is told
        import traceback  # 260 kB that each fork would have to take along

        cause = "".join(traceback.format_exception_only(type(error), error)).strip()
        return f"cannot import {name}: {cause}; install it for {sys.executable}, or {way_out}"
    found = _impurity(channel)
    return found and f"cannot hold {name} warm: importing it {found}; {way_out}"


def _impurity(channel: socket.socket) -> str | None:
    """What a fork of this process could not be given, as the end of a sentence."""
    if _cuda_is_initialised():
        return _USES_CUDA
    found = _impurity_of(_open_files(channel))
    if found is not None:
        return found
    threads = _threads()
    if threads:
        return f"leaves {len(threads)} thread(s) running ({', '.join(threads)}), which a fork would lack"
    processes = _processes()
    if processes:
        return f"leaves {len(processes)} process(es) running ({', '.join(processes)}), which all trials would share"
    return None


_USES_CUDA = "initialises CUDA, which does not survive a fork"


def _impurity_of(opened: list[str]) -> str | None:
    if any(target.startswith("/dev/nvidia") for target in opened):
        return _USES_CUDA
    # Other devices keep no place in them that could be shared.
    shared = [target for target in opened if not target.startswith("/dev/")]
    return f"leaves files open ({', '.join(shared)}), which all trials would share" if shared else None


def _threads() -> list[str]:
    """The names of the threads that would run in this process while it forks, this one left out.

    Libraries that are made to be forked end their threads before each fork, and start them again when they need them next:
    so does OpenBLAS, under numpy and scipy. Hence a fork for nothing, when there are any.
    """
    if len(os.listdir(_TASKS)) == 1:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of what is being found out here
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    deadline_s = time.monotonic() + _LONGEST_FORGETTING_S
    while len(os.listdir(_TASKS)) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    names = []
    for task in sorted(set(os.listdir(_TASKS)) - {str(os.getpid())}, key=int):
        try:
            with open(f"{_TASKS}/{task}/comm") as file:
                names.append(_python_name(int(task)) or file.read().strip())
        except OSError:  # it ended
            continue
    return names


def _processes() -> list[str]:
    """The names of this process's children that have not ended, as far as the kernel tells."""
    deadline_s = time.monotonic() + _LONGEST_FORGETTING_S
    while True:
        names = _children()
        if not names or time.monotonic() > deadline_s:  # one that is about to end may do so
            return names
        time.sleep(0.001)


def _children() -> list[str]:
    names = []
    for task in os.listdir(_TASKS):
        with contextlib.suppress(OSError):  # not every kernel tells
            with open(f"{_TASKS}/{task}/children") as file:
                children = file.read().split()
            for pid in children:
                with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
                    # The name stands in brackets and may hold anything. Source: proc_pid_stat(5).
                    name, _, rest = file.read().partition(" (")[2].rpartition(") ")
                    if rest[:1] not in ("Z", "X"):
                        names.append(name)
    return names


def _python_name(native_id: int) -> str | None:
    threading = sys.modules.get("threading")
    threads = threading.enumerate() if threading is not None else []
    return next((str(thread.name) for thread in threads if thread.native_id == native_id), None)


def _open_files(channel: socket.socket) -> list[str]:
    """What is open besides the standard three and the channel, as the kernel names it."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != channel.fileno():
            try:
                targets.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:  # the listing's own
                continue
    return targets


def _cuda_is_initialised() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


# ---- a trial


def _serve() -> tuple[str, Any]:
    """Start trials until the keeper is gone. Returns in a trial's own process only: its script's path, and source or code."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    names = sys.argv[2:]
    del sys.argv[1:]
    _become_ready(channel, names)
    _send(channel, ready=sys.executable)
    deaths = 0
    while True:
        found = _late_impurity()
        if found is not None:
            _refuse_next(
                channel, f"cannot start a trial warm: the interpreter {found}; it is started plainly"
            )
            continue
        news, tell = os.pipe()
        problem = _fork_twice()
        if problem is None:
            os.close(news)
            return _become(channel, tell)
        os.close(tell)
        told = _read_and_close(news)  # to its end: the spare has answered, or is dead
        number, _, answer = told.partition(b"\0")
        deaths = 0 if told else deaths + 1
        if _is_closed(channel):
            os._exit(0)
        if problem:
            _refuse_next(channel, problem)
        elif answer:
            _held.note(answer)
        elif told:
            # The keeper knows whether that one had answered, and was killed before it could tell so here.
            text = "cannot start a trial warm: its fork died at once; it is started plainly"
            _send(channel, refused=text, died=int(number))
        elif deaths >= _MOST_DEATHS:
            _refuse_next(
                channel,
                f"cannot start a trial warm: {deaths} forks of the interpreter died while they waited; it is started plainly",
            )


def _become_ready(channel: socket.socket, names: list[str]) -> None:
    """Import the modules, and do what only the first fork would find undone."""
    environ = dict(os.environb)
    if sys.version_info < (3, 8):  # noqa: UP036 - this is where an older one is told
        _refuse(
            channel, f"cannot hold {sys.executable} warm: it is older than Python 3.8; leave warmImports out"
        )
    found = _impurity(channel)
    if found is not None:
        _refuse(channel, f"cannot hold {sys.executable} warm: its start {found}; leave warmImports out")
    for name in names:
        _send(channel, importing=name)
        reason = _import(name, channel)
        if reason is not None:
            _refuse(channel, reason)
    _SHARED_IDS.update(map(id, sys.modules.values()))
    # A trial's environment is this one, as it was given, and what its request changes.
    os.environb.clear()
    os.environb.update(environ)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    for _ in _rehearse():
        continue
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page with an object on it


def _refuse_next(channel: socket.socket, text: str) -> None:
    """There is no spare, so the interpreter itself hears the next request."""
    for descriptor in _receive(channel)[1]:
        os.close(descriptor)
    _send(channel, refused=text)


def _is_closed(channel: socket.socket) -> bool:
    return _waiting(channel) == b""


def _waiting(channel: socket.socket) -> bytes | None:
    """The first byte of what is to be received; empty where nothing comes any more, None where nothing has come yet."""
    try:
        return channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


_REHEARSAL = """
class Thing:
    def value(self, a, b=2):
        return [i + b for i in range(a)]
print(f"{1 / 3:.1f}", *Thing().value(3), file=file, flush=True)
"""


def _rehearse() -> Iterator[None]:
    """Do what each trial does, in steps, so that functions are bound, caches filled and memory taken before they are wanted.

    In the interpreter, before the forks, it saves a third of a short trial's processor time. In a fork that waits, the pages that
    it shares with the interpreter are copied while nobody waits for them. Nothing is changed by it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _stream(number, name, getattr(sys, name), is_buffered=False)
    yield
    main = type(sys)("__main__")
    vars(main).update(_BLANK_MAIN)
    vars(main).update(file=io.StringIO())
    exec(compile(_REHEARSAL, "rehearsal", "exec", dont_inherit=True), vars(main))
    del main
    gc.collect()  # before anybody could see what that has left
    yield
    _modules_so_far()
    _are_flushed()
    variables = [b"%b=%b" % pair for pair in itertools.islice(os.environb.items(), _VARIABLES_REHEARSED)]
    _set_variables(_Request(b"\0".join((b"0 0 0 0", b"/", *variables))))
    yield
    with contextlib.suppress(OSError):  # the trial that runs may remove the folder
        os.path.dirname(os.path.realpath(os.path.abspath(os.path.join(os.getcwd(), "script"))))


def _rehearse_until_called(channel: socket.socket, steps: Iterator[None]) -> None:
    """Until something is to be received, or all is rehearsed: where trials are short nobody waits for the rest."""
    while _waiting(channel) is None and next(steps, _REHEARSED) is not _REHEARSED:
        continue


def _refuse(channel: socket.socket, text: str) -> NoReturn:
    """Say so, and stay until the keeper has ended what the modules have started: it finds that below this process."""
    _send(channel, refused=text)
    while True:
        _exactly(channel, 1)  # ends the process once the keeper lets go


def _late_impurity() -> str | None:
    """As `_impurity`, at the time of a fork: a thread may come later than the import that is behind it."""
    if _cuda_is_initialised():
        return "has initialised CUDA"
    threads = _threads()
    return f"runs {len(threads)} thread(s) now ({', '.join(threads)})" if threads else None


def _fork_twice() -> str | None:
    """Make the spare, as a child of whoever adopts orphans. In it: None. Here, once it is that: what went wrong, or nothing."""
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
        os.read(adopted, 1)  # its end
        os.close(adopted)
        return None
    os.close(adopted)
    status = os.waitpid(between, 0)[1]
    os.close(hold)
    number = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    return _not_forked(OSError(number, os.strerror(number))) if number else ""


def _not_forked(error: OSError) -> str:
    return f"cannot fork the warm interpreter: {error.strerror}; raise the limits on memory and processes"


def _become(channel: socket.socket, tell: int) -> tuple[str, Any]:
    """Wait for a request and turn this fork into the process that it asks for, once the keeper says so."""
    steps = _rehearse()
    _rehearse_until_called(channel, steps)
    request, (descriptor,) = _receive(channel)
    _tell(tell, b"%d\0" % os.getpid())
    word = socket.socket(fileno=descriptor)
    message: dict[str, Any] = {"prepared": os.getpid()}
    source, code, answer = b"", None, _UNFIT
    untouched, place = sys.path[:], ("", "")
    script = os.fsdecode(request.argv[0])
    try:
        _set_up(request)
        place = _set_path(script)
        source = _source_of(script)
        path = _path_of(script)
        code = _held.code_of(path, source)
        answer = _held.answer(path, source, code)
    except OSError as error:
        where = os.fsdecode(error.filename or script)
        message["refused"] = (
            f"cannot start a trial warm: cannot read {where}: {error.strerror}; it is started plainly"
        )
    _send(channel, **message)
    channel.close()
    _tell(tell, answer)
    # The next spare is forked now, and so is ready for the turn after this one's.
    os.close(tell)
    _rehearse_until_called(word, steps)
    # Nothing comes when the keeper is gone or has no use for this one any more: then nobody expects this trial.
    said, descriptors = _receive_descriptors(word, 1)
    if "refused" in message or not said:
        os._exit(1)
    # Only now: until then it belongs to the interpreter, and not to the trial that ran meanwhile.
    os.setsid()
    _tell(word.fileno(), _HAS_LEFT)
    word.close()
    _take_stdio(descriptors, is_buffered=not request.is_unbuffered)
    try:
        os.chdir(request.cwd)  # the trial before may have made it anew
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


def _tell(listener: int, word: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # it is gone, and this trial goes on
        os.write(listener, word)


def _set_up(request: _Request) -> None:
    """All that can be done before the trial's turn has come, but what its script brings with it."""
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
    """All of a file or a pipe; `open` would take twice as many words with the kernel."""
    try:
        data = piece = os.read(descriptor, _READ_BYTES)
        while piece:
            piece = os.read(descriptor, _READ_BYTES)
            data += piece
        return data
    finally:
        os.close(descriptor)


def _path_of(script: str) -> str:
    """The script's path as Python shows it: absolute since 3.9, and otherwise as it was written."""
    return os.path.join(os.getcwd(), script) if sys.version_info >= (3, 9) else script


class _Held:
    """The code of the script that is run again and again, for each spare to have from its fork on.

    All that it knows comes from spares: only they open what is the user's.
    """

    script = last = _NO_SCRIPT = ("", b"")
    """A script's path, as Python shows it, and what it holds: of the code, and of what the last spare had to compile."""
    code: Any = None

    def code_of(self, path: str, source: bytes) -> Any:
        """As `_compiled`, which takes a while."""
        return self.code if self.script == (path, source) else _compiled(path, source)

    def answer(self, path: str, source: bytes, code: Any) -> bytes:
        """What a spare tells `note` of its script; never nothing."""
        if code is None or len(source) > _LONGEST_HELD_BYTES:
            return _UNFIT
        return _WAS_HELD if code is self.code else b"%b\0%b" % (os.fsencode(path), source)

    def note(self, answer: bytes) -> None:
        """What a spare had to compile, the same twice in a row, is compiled here for all that follow."""
        if answer in (_UNFIT, _WAS_HELD):
            self.last = self._NO_SCRIPT
            return
        path, _, source = answer.partition(b"\0")
        before, self.last = self.last, (os.fsdecode(path), source)
        if before == self.last:
            self.script, self.code = self.last, _compiled(*self.last)


_held = _Held()


def _compiled(path: str, source: bytes) -> Any:
    """The script, ready to run; None if there is something to say of it: it is said when the trial has begun."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            code = compile(source, path, "exec", dont_inherit=True)
    except Exception:  # noqa: BLE001 - Python meets it again, and tells
        return None
    return None if said else code


def _up_to_date(script: str, source: bytes, code: Any) -> Any:
    """What is to be run, now that the turn has come: the code, or the source of a script that has changed since."""
    try:
        now = _source_of(script)
    except OSError as error:
        # In Python's words.
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
    """`sys.path` as `python script` has it; the folder this process is in, and where the script really lies.

    Relative entries of PYTHONPATH were taken from the folder that the interpreter is in.
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
    """Whether a link leads elsewhere than when `_set_path` told the place: that of the folder, or one below it to the script."""
    cwd, real = place
    if os.getcwd() != cwd:
        return True
    has_links = os.path.join(cwd, os.path.normpath(script)) != real
    return has_links and os.path.realpath(script) != real


def _stream(number: int, name: str, like: Any, *, is_buffered: bool) -> io.TextIOWrapper:
    """A standard stream over its descriptor, as Python makes it at its start, with the encoding that `like` was given then.

    Source: CPython, create_stdio in Python/pylifecycle.c.
    """
    is_output = number > 0
    file: Any = open(  # noqa: SIM115 - it lasts as long as the trial
        number, "wb" if is_output else "rb", -1 if is_buffered or not is_output else 0, closefd=False
    )
    raw = getattr(file, "raw", file)
    raw.name = f"<{name}>"
    # Since 3.9 stderr shows whole lines at once, even in a file.
    by_line = is_buffered and (raw.isatty() or (name == "stderr" and sys.version_info >= (3, 9)))
    stream = io.TextIOWrapper(
        file, like.encoding, like.errors, newline="\n", line_buffering=by_line, write_through=not is_buffered
    )
    stream.mode = "w" if is_output else "r"  # type: ignore[misc]
    return stream


def _fresh_main(script: str) -> str:
    """Put a `__main__` in place that has just begun to run the script; the script's path as Python shows it."""
    path = _path_of(script)
    main = type(sys)("__main__")
    namespace = vars(main)
    namespace.update(_BLANK_MAIN)
    namespace.update(
        __doc__=None, __file__=path, __loader__=type(_BLANK_MAIN["__loader__"])("__main__", path)
    )
    if "__annotations__" in namespace:
        namespace["__annotations__"] = {}
    sys.modules["__main__"] = main
    return path


def _hide_this_file(error: BaseException) -> None:
    """Have the error shown as it would be had this file not run the script."""
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

    # Not os._exit: what libraries registered with the C library is done. Not a CDLL: no other thread runs in the meantime.
    _exit: Any = ctypes.PyDLL(None).exit
except (ImportError, OSError, AttributeError):  # a Python built without it
    _exit = None
_exit_code: int | None = None


@atexit.register
def _end_at_once() -> None:
    """End a trial as Python does, but for taking apart what it shares with the interpreter: that would copy every page of it.

    It is registered before anything else, so it runs last: threads are joined, other functions have run. What is the trial's
    own goes as it would: its modules, with what is deleted or flushed when they go. Where Python would have something
    to say, it is left to Python.
    """
    # A thread that is left would see its modules go; only Python can stop it before.
    if _exit is None or _exit_code is None or _thread._count() or not _are_flushed():
        return
    own = _own_modules()
    if own is None:
        return
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    # io.IOBase knows them all as well, and takes hundreds of times as long to say so.
    kinds = (_io._IOBase, sys.modules["_pyio"].IOBase) if "_pyio" in sys.modules else _io._IOBase
    # As Python does: what dies with the modules is older then, and a file is flushed before what it writes to is closed.
    gc.collect()
    gone = [sys.modules.pop(name) for name in own if type(sys.modules.get(name)) is type(sys)]
    # A shared one may have a second name of the trial's.
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
            except Exception:  # noqa: BLE001 - Python, too, has nothing to say then
                pass
    if _are_flushed():
        _exit(_exit_code)


_SHARED_IDS: set[int] = set()
_shared: tuple[str, Any, int] = ("", None, 0)


def _modules_so_far() -> tuple[str, Any, int]:
    """The last one, by the order of their import, and how many there are. To look at each would copy the page of its name."""
    name = next(reversed(sys.modules))
    return name, sys.modules[name], len(sys.modules)


def _own_modules() -> list[str] | None:
    """Those that the interpreter has not given the trial, in order; None where that cannot be told any more."""
    last, module, count = _shared
    if type(sys.modules) is not dict or sys.modules.get(last) is not module:
        return None
    newest_first = list(itertools.takewhile(lambda name: name != last, reversed(sys.modules)))
    if len(sys.modules) - len(newest_first) != count:
        return None  # one of them was removed, or was imported anew and stands elsewhere
    return [*(["__main__"] if "__main__" in sys.modules else []), *reversed(newest_first)]


def _are_flushed() -> bool:
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except Exception:  # noqa: BLE001 - Python meets it again, and tells
        return False
    return True


def _clear(namespace: dict[str, Any]) -> None:
    """Source: CPython, _PyModule_ClearDict: what begins with one underscore goes first."""
    for is_private in (True, False):
        for name in list(namespace):
            if (name.startswith("_") and not name.startswith("__")) is is_private and name != "__builtins__":
                namespace[name] = None


def _code_of(error: BaseException) -> int | None:
    """What the process ends with after this error; None where Python does more than end."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF if type(error.code) is int else 1
    return (
        1 if isinstance(error, Exception) and getattr(sys, "excepthook", None) is sys.__excepthook__ else None
    )


if __name__ == "__main__":
    _own_code = sys._getframe().f_code  # kept: to let go of it would copy what it holds
    _script, _program = _serve()
    _shared = _modules_so_far()
    _path = _fresh_main(_script)
    try:
        # No name of this file's for the namespace: it would keep the script's objects from being deleted at the end.
        if isinstance(_program, bytes):
            _program = compile(_program, _path, "exec", dont_inherit=True)
        exec(_program, vars(sys.modules["__main__"]))
        _exit_code = 0
    except BaseException as _error:
        _exit_code = _code_of(_error)
        if not isinstance(_error, SystemExit):
            _hide_this_file(_error)
        raise
