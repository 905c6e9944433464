"""The process that runs a user's tuner or assessor: it receives calls and returns answers, as lines of JSON.

Theory of operation. The manager starts `python -m nni_manager.tuner.user_worker FD` in the folder of the user's code; FD is one
end of a pair of sockets. Each received line is a call, `[method of _Worker, its arguments]`. Each call is answered by one line:
`["ok", answer]`, or `["raised", traceback]` for any exception of the user's code, SystemExit included. The ids of trials that an
advisor stops follow the answer. Calls are served one by one on the main thread, as the user's code may require. When the manager
exits, its end of the pair closes, and this process ends with all its descendants. Forked children close their copy of the socket:
the manager detects the end of this process.

Output of the user's code goes to stdout, which the manager stores in a file. Only the standard library and nni_sdk are
imported here, so the user's code may use any version of any package.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from nni_sdk.advisor import MsgDispatcherBase
from nni_sdk.aliases import install_import_aliases

# Between the scores of the manager and of a trial (500 more): if memory is full, the kernel kills a trial first.
_OOM_SCORE = 250
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main() -> int:
    """Serve calls until the manager closes its end."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(
        connection.fileno(), False
    )  # child processes of the user's code must not hold the socket open
    os.register_at_fork(after_in_child=lambda: _close_in_child(connection))
    # Ends this process with its parent, even if the user's code blocks all other threads. The parent is the manager's thread that
    # started this process; the thread lives as long as the process is needed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_OOM_SCORE))
    install_import_aliases(advisors_are_ours=True)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_queue_calls, args=(connection, calls), daemon=True).start()
    worker = _Worker()
    while True:
        name, arguments = json.loads(calls.get())
        try:
            answer = getattr(worker, name)(*arguments)
            line = _line("ok", answer, *worker.take_stops())
        except BaseException:  # noqa: BLE001 - includes SystemExit
            line = _line("raised", traceback.format_exc())
        connection.sendall(line)


def _close_in_child(connection: socket.socket) -> None:
    descriptor = connection.detach()  # `close` would wait for the reading thread
    if descriptor >= 0:
        os.close(descriptor)


def _queue_calls(connection: socket.socket, calls: queue.SimpleQueue[bytes]) -> None:
    """Queue calls; kill this process when the manager exits, even if the main thread hangs."""
    with contextlib.suppress(OSError), connection.makefile("rb") as lines:
        for line in lines:
            calls.put(line)
    os.killpg(0, signal.SIGKILL)


def _line(*answer: Any) -> bytes:
    return json.dumps(answer, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Convert numbers and arrays of numpy and similar libraries to plain values."""
    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(
            f"cannot encode {value!r} as JSON: its type is {type(value).__name__}; convert it to plain values"
        )
    return to_list()


def _metric(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # the text was not written by an SDK


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class _Worker:
    """The methods that the manager may call."""

    def __init__(self) -> None:
        self._target: Any = None
        self._next_id = 0
        self._delivered: list[tuple[int, Any]] = []

    def find(self, path: str) -> None:
        """Import a class."""
        _load(path)

    def make(
        self, class_name: str, class_args: dict[str, Any] | None, validator: str | None, is_resumed: bool
    ) -> None:
        """Create the object of the user's class."""
        if validator is not None:
            _load(validator)().validate_class_args(**(class_args or {}))
        self._target = _load(class_name)(**(class_args or {}))
        if is_resumed and hasattr(self._target, "load_checkpoint"):
            self._target.load_checkpoint()

    def update_search_space(self, space: dict[str, Any]) -> None:
        """Call NNI's method of this name."""
        self._target.update_search_space(space)

    def ask(self) -> list[Any] | None:
        """An id and parameters; None if there are none at present."""
        if self._delivered:
            return list(self._delivered.pop(0))
        parameter_id = self._next_id
        self._next_id += 1
        found = self._generate(parameter_id)
        if found:
            return [parameter_id, found[0]]
        # The callback may have delivered parameters for this id, or for an earlier one.
        return list(self._delivered.pop(0)) if self._delivered else None

    def ask_again(self, parameter_id: int) -> None:
        """Replay a proposal of an earlier id; the parameters that are proposed now are discarded."""
        self._next_id = max(self._next_id, parameter_id + 1)
        self._generate(parameter_id)
        self._delivered = [each for each in self._delivered if each[0] != parameter_id]

    def discard_delivered(self) -> None:
        """Discard parameters delivered during the replay: they are in the history, or will be delivered again."""
        self._delivered.clear()

    def _generate(self, parameter_id: int) -> list[Any]:
        found = self._target.generate_multiple_parameters([parameter_id], st_callback=self._deliver)
        if found is None and not self._delivered:
            raise TypeError(
                "generate_multiple_parameters returned None; return a list with parameters, or an empty list if there are none"
            )
        return list(found or [])

    def _deliver(self, parameter_id: int, parameters: Any) -> None:
        self._delivered.append((parameter_id, parameters))

    def tell(
        self, parameter_id: int, parameters: Any, metric: str | None, trial_job_id: str, success: bool
    ) -> None:
        """Report that a trial has ended; `metric` is its result as JSON text, None: there is none."""
        if metric is not None:
            self._target.receive_trial_result(
                parameter_id, parameters, _metric(metric), trial_job_id=trial_job_id, customized=False
            )
        self._target.trial_end(parameter_id, success, trial_job_id=trial_job_id)

    def report(self, parameter_id: int, trial_job_id: str, values: list[str]) -> None:
        """Report intermediate results of a trial, as JSON texts, to an advisor."""
        for value in values:
            self._target.receive_intermediate_result(parameter_id, _metric(value), trial_job_id=trial_job_id)

    def take_stops(self) -> list[str]:
        """The trials that the user's advisor stops since the last call."""
        return list(self._target.take_stops()) if isinstance(self._target, MsgDispatcherBase) else []

    def import_data(self, data: list[tuple[dict[str, Any], str]]) -> None:
        """Call NNI's method of this name; each item is parameters and the result as JSON text."""
        self._target.import_data(
            [{"parameter": parameters, "value": _metric(metric)} for parameters, metric in data]
        )

    def assess(self, trial_job_id: str, history: list[str]) -> bool:
        """True if the trial may continue; `history` is a list of JSON texts."""
        result = self._target.assess_trial(trial_job_id, [_metric(each) for each in history])
        is_good = getattr(result, "value", result)
        is_good = is_good.tolist() if hasattr(is_good, "tolist") else is_good  # of numpy
        if not isinstance(is_good, bool):
            raise TypeError(
                f"assess_trial returned {result!r}, which is no answer; return AssessResult.Good or AssessResult.Bad"
            )
        return is_good

    def end(self, trial_job_id: str, success: bool) -> None:
        """Report that an assessed trial has ended."""
        self._target.trial_end(trial_job_id, success)


if __name__ == "__main__":
    sys.exit(main())
