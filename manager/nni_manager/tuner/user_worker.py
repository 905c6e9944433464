"""The process in which a tuner or an assessor of the user's own lives: calls come in, answers go out, as lines of JSON.

Theory of operation. The manager starts `python -m nni_manager.tuner.user_worker FD` in the folder of the user's code; FD is one
end of a pair of sockets. Each line that comes is a call, `[method of _Worker, its arguments]`, and each is answered by one line:
`["ok", answer]`, or `["raised", traceback]` for whatever the user's code raises, SystemExit too. Calls are served one by one on
the main thread, as the user's code may demand. When the manager is gone, its end of the pair is closed, and this process ends
with all it has started. What is forked of it lets go of the pair: an answer comes from this process alone, and its end is seen.

What user code prints goes to the process's own stdout, which the manager keeps in a file. Only the standard library and nni_sdk
are imported here, so the user's code may have any version of anything.
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

from nni_manager.names_of_nni import answer_to_names_of_nni

# Between the manager and a trial, which has 500 more than the manager: memory that is full takes a trial first.
_OOM_SCORE = 250
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main() -> int:
    """Serve calls until the manager closes its end."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # nothing the user's code starts is to hold it open
    os.register_at_fork(after_in_child=lambda: _let_go_of(connection))
    # Also while the user's code keeps all other threads from running. The manager's thread that has started this process lasts
    # as long as it needs it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_OOM_SCORE))
    answer_to_names_of_nni()
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_take_calls, args=(connection, calls), daemon=True).start()
    worker = _Worker()
    while True:
        name, arguments = json.loads(calls.get())
        try:
            line = _line("ok", getattr(worker, name)(*arguments))
        except BaseException:  # noqa: BLE001 - also what sys.exit raises
            line = _line("raised", traceback.format_exc())
        connection.sendall(line)


def _let_go_of(connection: socket.socket) -> None:
    descriptor = connection.detach()  # `close` would wait for who reads it
    if descriptor >= 0:
        os.close(descriptor)


def _take_calls(connection: socket.socket, calls: queue.SimpleQueue[bytes]) -> None:
    """Whatever the main thread does meanwhile: one that hangs must not outlive the manager."""
    with contextlib.suppress(OSError), connection.makefile("rb") as lines:
        for line in lines:
            calls.put(line)
    os.killpg(0, signal.SIGKILL)


def _line(*answer: Any) -> bytes:
    return json.dumps(answer, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and the like, as their plain counterparts."""
    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(f"cannot write {value!r} of type {type(value).__name__} as JSON; convert it")
    return to_list()


def _metric(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # written by something else than an SDK


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class _Worker:
    """What the manager may call."""

    def __init__(self) -> None:
        self._target: Any = None
        self._next_id = 0
        self._given_later: list[tuple[int, Any]] = []

    def make(
        self, class_name: str, class_args: dict[str, Any] | None, validator: str | None, is_resumed: bool
    ) -> None:
        """Make the object of the user's class."""
        if validator is not None:
            _load(validator)().validate_class_args(**(class_args or {}))
        self._target = _load(class_name)(**(class_args or {}))
        if is_resumed and hasattr(self._target, "load_checkpoint"):
            self._target.load_checkpoint()

    def update_search_space(self, space: dict[str, Any]) -> None:
        """As NNI's method of this name."""
        self._target.update_search_space(space)

    def ask(self) -> list[Any] | None:
        """An id and parameters; None when there are none at present."""
        if self._given_later:
            return list(self._given_later.pop(0))
        parameter_id = self._next_id
        self._next_id += 1
        found = self._generate(parameter_id)
        if found:
            return [parameter_id, found[0]]
        # What came by the callback may be for this id, or for one of before.
        return list(self._given_later.pop(0)) if self._given_later else None

    def ask_again(self, parameter_id: int) -> None:
        """Have the tuner know an id of before; what it proposes now does not count."""
        self._next_id = max(self._next_id, parameter_id + 1)
        self._generate(parameter_id)
        self._given_later = [each for each in self._given_later if each[0] != parameter_id]

    def forget_given(self) -> None:
        """Drop what came by the callback while history was told again: it is among that history, or comes anew."""
        self._given_later.clear()

    def _generate(self, parameter_id: int) -> list[Any]:
        found = self._target.generate_multiple_parameters([parameter_id], st_callback=self._give_later)
        return list(found or [])

    def _give_later(self, parameter_id: int, parameters: Any) -> None:
        self._given_later.append((parameter_id, parameters))

    def tell(
        self, parameter_id: int, parameters: Any, metric: str | None, trial_job_id: str, success: bool
    ) -> None:
        """A trial is over; `metric` is its result as JSON text."""
        if metric is not None:
            self._target.receive_trial_result(
                parameter_id, parameters, _metric(metric), trial_job_id=trial_job_id, customized=False
            )
        self._target.trial_end(parameter_id, success, trial_job_id=trial_job_id)

    def import_data(self, data: list[tuple[dict[str, Any], str]]) -> None:
        """As NNI's method of this name; each is parameters and the result as JSON text."""
        self._target.import_data(
            [{"parameter": parameters, "value": _metric(metric)} for parameters, metric in data]
        )

    def assess(self, trial_job_id: str, history: list[str]) -> bool:
        """Whether the trial may go on; the history is JSON texts."""
        result = self._target.assess_trial(trial_job_id, [_metric(each) for each in history])
        return bool(getattr(result, "value", result))

    def end(self, trial_job_id: str, success: bool) -> None:
        """A trial that was assessed is over."""
        self._target.trial_end(trial_job_id, success)


if __name__ == "__main__":
    sys.exit(main())
