"""The functions that training code calls: parameters in, metrics out.

A report is one `write` to a file opened with `O_APPEND`: no thread, no socket, no buffer. Everything reported before a crash is
in the file, which the keeper replicates.

Many writers may report at once, and none ever splits another's record:

- threads share one descriptor, and one counter whose `next` is atomic;
- children of `fork` inherit both, and continue counting independently;
- `spawn`ed processes and processes of other ranks open the same file and count from 0.

So `sequence` orders the reports of one process, and only the offset in the file identifies a record.

Only modules that the interpreter has already loaded are imported at the top; others are imported at their first use.
"""

import os
from itertools import count

from nni_sdk.errors import EnvironmentIncomplete, MetricNotWritten, ParametersMissing
from nni_sdk.frame import frame, frame_head, value_json

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from collections.abc import Mapping
    from logging import Logger
    from typing import Any

STANDALONE = "STANDALONE"
"""Experiment id and trial id of training code that runs outside any experiment."""

# NNI's platform names for "no experiment": standalone mode, and NNI's own unit tests.
_STANDALONE_PLATFORMS = ("", "standalone", "unittest")

_NOT_OPEN = -1
# Training code that closes all descriptors and opens files again uses the lowest numbers.
_LOWEST_METRICS_FD = 256
# No file can have this path.
_NO_NOTICE = os.devnull + "/none"
_MAX_NUMBER = 1e308

PARAMETERS_WERE_TAKEN = "NNI_SDK_PARAMETERS_WERE_TAKEN"
"""Set in the environment of child processes, which may report what this process has asked for."""


class TrialContext:
    """The trial of this process, or no trial (`is_standalone`).

    Everything is read and opened on first use, so a process may import the SDK, fork one child per trial, and set the environment
    in each child.
    """

    def __init__(self, environ: "Mapping[str, str]") -> None:
        self._environ = environ
        self.loaded: dict[str, Any] | None = None
        self.parameters_were_taken = False
        self.function_may_take_them = False
        """True until an objective function, which was called with the parameters, asks for them itself."""
        self.next_sequence = count().__next__
        self.final_was_reported = False
        self.has_warned = False
        self.has_warned_of_number = False
        self.stop_notice = ""
        self.metrics_fd = _NOT_OPEN
        self.continuation: list[bytes] = []
        """The record that names the checkpoint from which this process continues, until it is written."""
        self.periodical_head = self.final_head = ""

    @property
    def is_standalone(self) -> bool:
        """True if the process runs outside any experiment: results are only logged."""
        return self._environ.get("NNI_PLATFORM", "") in _STANDALONE_PLATFORMS

    @property
    def metrics_path(self) -> str:
        """The file of all records of this trial's task.

        Raises:
            EnvironmentIncomplete: `NNI_SYS_DIR` is not set.
        """
        return os.path.join(self.variable("NNI_SYS_DIR"), ".nni", "metrics")

    @property
    def result_metrics(self) -> "list[str]":
        """The metrics of objectives and constraints that a final result must have; empty: a number is enough."""
        names = self._environ.get("NNI_RESULT_METRICS")
        if not names:
            return []
        import json

        return list(json.loads(names))

    def variable(self, name: str) -> str:
        """Return a variable that every trial has.

        Raises:
            EnvironmentIncomplete: the variable is not set.
        """
        value = self._environ.get(name)
        if not value:
            raise EnvironmentIncomplete(
                f"cannot run as a trial: NNI_PLATFORM is set but {name} is not; "
                "pass all NNI_ variables to this process, or unset NNI_PLATFORM to run without an experiment"
            )
        return value

    def parameter_file(self) -> "dict[str, Any]":
        """Return the content of parameter.cfg: `parameter_id` and `parameters`.

        Raises:
            ParametersMissing: the file is absent or damaged.
        """
        if self.loaded is None:
            import json

            path = os.path.join(self.variable("NNI_SYS_DIR"), "parameter.cfg")
            try:
                with open(path, encoding="utf-8") as file:
                    content = json.load(file)
            except (OSError, ValueError, RecursionError) as error:
                raise ParametersMissing(
                    f"cannot read this trial's parameters from {path}: {error}; check the storage, and that nothing changed "
                    "NNI_SYS_DIR (the keeper wrote the file before it started the trial)"
                ) from error
            if not isinstance(content, dict) or not {"parameter_id", "parameters"} <= content.keys():
                raise ParametersMissing(
                    f"cannot use {path}: it is not a JSON object with parameter_id and parameters; "
                    "do not change the file that the keeper wrote"
                )
            # Training code that empties or replaces os.environ is still this trial.
            self._environ = dict(self._environ)
            self.loaded = content
            self._report_interpreter()
        return self.loaded

    def _report_interpreter(self) -> None:
        """Tell the keeper which Python runs this code and where its packages are. The first process of a trial counts."""
        import json
        import sys

        path = os.path.join(self.variable("NNI_SYS_DIR"), ".nni", "python.json")
        version = "{}.{}.{}".format(*sys.version_info[:3])
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, json.dumps({"version": version, "path": sys.path}).encode())
            finally:
                os.close(descriptor)
        except (OSError, TypeError, ValueError):
            pass  # another process was first, the storage is full, or sys.path holds no texts: only the record lacks it

    def awaited_stop_notice(self) -> str:
        """Tell the keeper that this code asks for the stop notice, and return the path of the notice.

        The keeper writes the notice before it looks for this, so no stop is missed in between.
        """
        if self.is_standalone:
            self.stop_notice = _NO_NOTICE
        else:
            folder = self.variable("NNI_SYS_DIR")
            self.stop_notice = os.path.join(folder, "stop_notice.json")
            flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
            try:  # noqa: SIM105 - contextlib may not be loaded
                os.close(os.open(os.path.join(folder, ".nni", "awaits_stop_notice"), flags, 0o644))
            except OSError:
                pass  # a full or read-only storage: SIGTERM then comes with the notice
        return self.stop_notice

    def reporting_starts(self) -> bool:
        """Prepare for records; False when standalone. `metrics_fd` is set last: other threads check it without a lock."""
        parameter_id, trial_id = 0, STANDALONE
        if not self.is_standalone:
            parameter_id, trial_id = self.parameter_file()["parameter_id"], self.variable("NNI_TRIAL_JOB_ID")
        self.periodical_head = frame_head(parameter_id, trial_id, "PERIODICAL")
        self.final_head = frame_head(parameter_id, trial_id, "FINAL")
        if self.is_standalone:
            return False
        if self.continuation:
            self._append_first(self.continuation[0])
        self.metrics_fd = _moved_up(self._opened_metrics())
        return True

    def _append_first(self, data: bytes) -> None:
        descriptor = self._opened_metrics()
        try:
            # A partial record would only hide the one after it, and each report retries with a whole one.
            if os.write(descriptor, data) == len(data):
                self.continuation.clear()
        except OSError as error:
            raise self._not_written(error) from error
        finally:
            os.close(descriptor)

    def append_mark(self, type_: str, value: str) -> None:
        """Append a record that is no metric: CHECKPOINT or CONTINUED. `value`: its JSON text."""
        if self.metrics_fd == _NOT_OPEN:
            self.reporting_starts()
        parameter_id, trial_id = self.parameter_file()["parameter_id"], self.variable("NNI_TRIAL_JOB_ID")
        self.append(frame(frame_head(parameter_id, trial_id, type_), 0, value))

    def continues(self, value: str) -> None:
        """Record before the next report that this process continues from a checkpoint. `value`: the record's JSON text.

        A process that never reports, such as that of another rank, writes no such record.
        """
        if self.metrics_fd != _NOT_OPEN:
            self.append_mark("CONTINUED", value)
            return
        parameter_id, trial_id = self.parameter_file()["parameter_id"], self.variable("NNI_TRIAL_JOB_ID")
        self.continuation[:] = [frame(frame_head(parameter_id, trial_id, "CONTINUED"), 0, value)]

    def _opened_metrics(self) -> int:
        path = self.metrics_path
        flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
        try:
            try:
                return os.open(path, flags, 0o644)
            except FileNotFoundError:  # a keeper creates the folder; NNI's own does not always
                os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
                return os.open(path, flags, 0o644)
        except OSError as error:
            raise self._not_written(error) from error

    def warn_without_number(self, metric: object, value: str, is_final: bool = False) -> None:
        """Warn on stderr, once, of a result that tuner and assessor cannot use. `value`: its JSON text.

        In an experiment with objectives or constraints of its own, there may be a warning for each kind of result.
        """
        # The usual result needs no import; NaN is in no range.
        is_number = type(metric) in (int, float) and -_MAX_NUMBER < metric < _MAX_NUMBER  # type: ignore[operator]
        names = self.result_metrics
        if self.has_warned_of_number or (is_number and not names):
            return
        from nni_sdk.unusable_results import warning

        text = warning(value, names, is_final)
        if text:
            self.has_warned_of_number = is_final or not names
            _log().warning(text)

    def append(self, data: bytes) -> None:
        """Append one record to the open file."""
        try:
            written = os.write(self.metrics_fd, data)
        except OSError as error:
            self._append_after(error, data)
        else:
            if written < len(data):
                self._append_after(None, data)

    def _append_after(self, error: "OSError | None", data: bytes) -> None:
        """Retry the write after a short write, or if other code has closed the descriptor.

        Writes the whole record again, not its rest: another process may have appended in between. A reader skips the partial
        record.
        """
        import errno

        if error is not None:
            if error.errno != errno.EBADF:
                raise self._not_written(error) from error
            # A process that daemonises itself closes all descriptors.
            self.metrics_fd = _moved_up(self._opened_metrics())
        try:
            written = os.write(self.metrics_fd, data)
        except OSError as second_error:
            raise self._not_written(second_error) from second_error
        if written < len(data):
            no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise self._not_written(no_space) from no_space

    def _not_written(self, cause: OSError) -> MetricNotWritten:
        error = MetricNotWritten(
            f"cannot append a metric to {self.metrics_path}: {cause.strerror}; "
            "make the storage writable or free space on it, then run the trial again"
        )
        error.errno = cause.errno
        return error


def _moved_up(descriptor: int) -> int:
    """Return a descriptor of the same file whose number no other file gets after training code has closed it."""
    import fcntl

    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _LOWEST_METRICS_FD)
    except OSError:
        return descriptor  # the limit of open files is lower
    os.close(descriptor)
    return moved


_trial = TrialContext(os.environ)


def get_next_parameter() -> "Any":
    """Return the parameters that the tuner chose for this trial, as a dict; None after the first call.

    A function that is the objective, and was called with them, may still ask for them once. Outside an experiment: an empty dict,
    and a warning on stderr.

    Raises:
        ParametersMissing: the parameter file is absent or damaged.
        EnvironmentIncomplete: a variable that every trial has is missing.
    Source: NNI v3.0 SDK, a trial without multi-phase.
    """
    if _trial.is_standalone:
        _log().warning(
            "Running outside an experiment: parameters are empty and results are only logged. "
            "Start an experiment with: nnictl create --config <file>"
        )
        _trial.loaded = {"parameter_id": None, "parameters": {}}
    elif _trial.parameters_were_taken and not _trial.function_may_take_them:
        return None
    _trial.function_may_take_them = False
    parameters = _trial.parameter_file()["parameters"]
    if not _trial.parameters_were_taken:
        _trial.parameters_were_taken = True
        os.environ[PARAMETERS_WERE_TAKEN] = "1"
    return parameters


def get_current_parameter(tag: "str | None" = None) -> "Any":
    """Return the parameters that `get_next_parameter` returned, or their member `tag`; None before its first call.

    Raises:
        KeyError: the parameters have no `tag`.
    Source: NNI v3.0 SDK.
    """
    if not _trial.parameters_were_taken:
        return None
    parameters = _trial.parameter_file()["parameters"]
    return parameters if tag is None else parameters[tag]


def report_intermediate_result(metric: object) -> None:
    """Append one intermediate result, a number or a dict with a number under `default`, to this trial's metrics.

    When it returns, the record is in the file: no crash of this process loses it. May be called without
    `get_next_parameter`, from any thread and from any process of the trial. Outside an experiment the result is logged.

    Raises:
        MetricInvalid: JSON cannot represent the metric. Nothing was written.
        MetricTooLong: the record would exceed 999,999 bytes. Nothing was written.
        MetricNotWritten: the storage rejected the record.
        ParametersMissing: the parameter file, which holds the parameter id, is absent or damaged.
        EnvironmentIncomplete: a variable that every trial has is missing.
    """
    value = value_json(metric)
    trial = _trial
    if trial.metrics_fd == _NOT_OPEN:
        if not trial.reporting_starts():
            index = trial.next_sequence()
            frame(trial.periodical_head, index, value)  # too long: raises as in a trial
            _log().info("Intermediate result: %s  (Index %s)", value, index)
            return
        trial.warn_without_number(metric, value)  # only of the first: later ones have the same form
    trial.append(frame(trial.periodical_head, trial.next_sequence(), value))


def report_final_result(metric: object) -> None:
    """Append the final result of this trial, a number or a dict with a number under `default`.

    A second final result is written as well, with a warning on stderr: the manager counts the first. So is that of code which has
    not asked for parameters, since all its trials are the same.

    Raises: as `report_intermediate_result`.
    """
    value = value_json(metric)
    trial = _trial
    if trial.metrics_fd == _NOT_OPEN and not trial.reporting_starts():
        frame(trial.final_head, 0, value)  # too long: raises as in a trial
        _log().info("Final result: %s", value)
        return
    trial.warn_without_number(metric, value, is_final=True)
    data = frame(trial.final_head, 0, value)
    if trial.final_was_reported and not trial.has_warned:
        trial.has_warned = True
        _log().warning(
            "cannot replace the final result by %s: the manager counts the first; call report_final_result once",
            value,
        )
    elif not (trial.parameters_were_taken or trial.has_warned or PARAMETERS_WERE_TAKEN in os.environ):
        trial.has_warned = True
        _log().warning(
            "the final result does not depend on the parameters of this trial: nothing has asked for them; "
            "call nni.get_next_parameter()"
        )
    trial.append(data)
    trial.final_was_reported = True


def should_stop() -> bool:
    """Return True as soon as this trial is to end: save the model, report a final result if there is one, and return.

    Costs less than `os.stat`, so it may be asked at each step, from any thread and process of the trial. After the first call
    a stop gives the code half of the grace period (15 s of 30 s) before SIGTERM. On shared storage of a cluster True may come
    some seconds late. False outside an experiment.

    Raises:
        EnvironmentIncomplete: a variable that every trial has is missing.
    """
    return os.access(_trial.stop_notice or _trial.awaited_stop_notice(), os.F_OK)


def stop_reason() -> "str | None":
    """Return why this trial is to end; None as long as `should_stop()` is False.

    One of `early stopped` (the assessor), `stopped by user` (this trial), `experiment stopped`, `time limit`, `trial over` (other
    tasks have ended the trial),
    `preempted` (Kubernetes has reported that it preempts the pod) and `job lost` (the cluster ends the container).

    Raises: as `should_stop`.
    """
    if not should_stop():
        return None
    import json

    with open(_trial.stop_notice, encoding="utf-8") as file:
        return str(json.load(file)["reason"])


def get_experiment_id() -> str:
    """Return the experiment's id; `STANDALONE` outside an experiment.

    Raises:
        EnvironmentIncomplete: the process is a trial and `NNI_EXP_ID` is missing.
    """
    return STANDALONE if _trial.is_standalone else _trial.variable("NNI_EXP_ID")


def get_trial_id() -> str:
    """Return this trial's id; `STANDALONE` outside an experiment.

    Raises:
        EnvironmentIncomplete: the process is a trial and `NNI_TRIAL_JOB_ID` is missing.
    """
    return STANDALONE if _trial.is_standalone else _trial.variable("NNI_TRIAL_JOB_ID")


def get_sequence_id() -> int:
    """Return this trial's number in its experiment, from 0 in order of creation; 0 outside an experiment.

    Raises:
        EnvironmentIncomplete: the process is a trial and `NNI_TRIAL_SEQ_ID` is missing or not a number.
    """
    if _trial.is_standalone:
        return 0
    text = _trial.variable("NNI_TRIAL_SEQ_ID")
    try:
        return int(text)
    except ValueError as error:
        raise EnvironmentIncomplete(
            f"cannot use NNI_TRIAL_SEQ_ID={text!r} as this trial's number; "
            "do not change the NNI_ variables that the keeper set"
        ) from error


def _log() -> "Logger":
    """Return the SDK's logger. It writes to stderr, independent of the training code's logging setup."""
    import logging

    log = logging.getLogger("nni_sdk")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s (%(name)s) %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # each import from this module asks for __path__
        raise AttributeError(name)
    from nni_sdk.aliases import absent

    return absent("nni_sdk.trial", name)
