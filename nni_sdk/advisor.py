"""Base class for custom advisors, with NNI's names: `from nni.runtime.msg_dispatcher_base import MsgDispatcherBase`.

An advisor replaces tuner and assessor: it handles commands, and answers by `send`. Here it is a tuner whose methods are
translated to commands. Source: NNI v1.9, v2.10 and v3.0, nni.runtime.msg_dispatcher_base.
"""

import json
from enum import Enum

from nni_sdk.tuner import Tuner
from nni_sdk.utils import MetricType

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


class CommandType(Enum):
    """The commands of the manager, and the answers of an advisor."""

    Initialize = "IN"
    RequestTrialJobs = "GE"
    ReportMetricData = "ME"
    UpdateSearchSpace = "SS"
    ImportData = "FD"
    AddCustomizedTrialJob = "AD"
    TrialEnd = "EN"
    Terminate = "TE"
    Ping = "PI"
    Initialized = "ID"
    NewTrialJob = "TR"
    SendTrialJobParameter = "SP"
    NoMoreTrialJobs = "NO"
    KillTrialJob = "KI"
    Error = "ER"


_sent = []  # type: list[tuple[str, Any]]
"""The answers that were not processed yet: a process has one advisor."""


def send(command: "Any", data: "Any") -> None:
    """Answer the manager. `command` is a `CommandType`, ours or of NNI's package; `data` is JSON text or empty."""
    _sent.append((command.name, data))


def _not_overridden(name: str) -> NotImplementedError:
    return NotImplementedError(f"cannot run this advisor: its class has no {name}; define this method")


class MsgDispatcherBase(Tuner):
    """Base of an advisor: override the methods `handle_...`, each of which receives the data of one command."""

    def __init__(self, command_channel_url: "str | None" = None) -> None:
        """Start without trials; the argument has no effect."""
        self._is_initialized = False
        self._missing = []  # type: list[int]
        self._ready = []  # type: list[dict[str, Any]]
        self._trials = {}  # type: dict[int, dict[str, Any]]
        self._deliver = None  # type: Any
        self._sequences = {}  # type: dict[str, int]
        self._to_stop = []  # type: list[str]
        self._stopped = set()  # type: set[str]

    def send(self, command: "Any", data: "Any") -> None:
        """See the function `send`."""
        send(command, data)

    def handle_initialize(self, data: "dict[str, Any]") -> None:
        """Receive the search space, once; answer `Initialized`."""
        raise _not_overridden("handle_initialize")

    def handle_request_trial_jobs(self, data: int) -> None:
        """Answer `NewTrialJob` this many times, now or later, each with parameter_id and parameters."""
        raise _not_overridden("handle_request_trial_jobs")

    def handle_update_search_space(self, data: "dict[str, Any]") -> None:
        """Receive another search space."""
        raise _not_overridden("handle_update_search_space")

    def handle_import_data(self, data: "list[dict[str, Any]]") -> None:
        """Receive prior results: each has `parameter` and `value`."""
        raise _not_overridden("handle_import_data")

    def handle_add_customized_trial(self, data: "Any") -> None:
        """Not called here: trials of users are not reported to tuners."""

    def handle_report_metric_data(self, data: "dict[str, Any]") -> None:
        """Receive a result: parameter_id, trial_job_id, type (a `MetricType`), sequence, and value as JSON text."""
        raise _not_overridden("handle_report_metric_data")

    def handle_trial_end(self, data: "dict[str, Any]") -> None:
        """Receive the end of a trial: trial_job_id, event, and hyper_params, which is what `NewTrialJob` sent."""
        raise _not_overridden("handle_trial_end")

    # ---- the methods of a tuner, which the manager calls

    def update_search_space(self, search_space: "dict[str, Any]") -> None:
        """See `Tuner`."""
        if self._is_initialized:
            self.handle_update_search_space(search_space)
        else:
            self._is_initialized = True
            self.handle_initialize(search_space)
        self._receive()

    def generate_multiple_parameters(
        self, parameter_id_list: "list[int]", **kwargs: "Any"
    ) -> "list[dict[str, Any]]":
        """See `Tuner`. An advisor that owes parameters is not asked for more; `st_callback` gets them later."""
        self._deliver = kwargs.get("st_callback")
        found = []
        for parameter_id in parameter_id_list:
            if not (self._ready or self._missing):
                self.handle_request_trial_jobs(1)
                self._receive()
                if not self._ready:
                    self._missing.append(parameter_id)
            if self._ready:
                found.append(self._give(parameter_id))
        return found

    def receive_trial_result(
        self, parameter_id: int, parameters: "dict[str, Any]", value: "Any", **kwargs: "Any"
    ) -> None:
        """See `Tuner`."""
        self._report(MetricType.FINAL, parameter_id, kwargs["trial_job_id"], 0, value)

    def receive_intermediate_result(self, parameter_id: int, value: "Any", *, trial_job_id: str) -> None:
        """Called with each intermediate result of a running trial."""
        sequence = self._sequences.get(trial_job_id, 0)
        self._sequences[trial_job_id] = sequence + 1
        self._report(MetricType.PERIODICAL, parameter_id, trial_job_id, sequence, value)

    def _report(self, kind: str, parameter_id: int, trial_job_id: str, sequence: int, value: "Any") -> None:
        data = {
            "parameter_id": self._trials[parameter_id]["parameter_id"],
            "trial_job_id": trial_job_id,
            "type": kind,
            "sequence": sequence,
            "value": json.dumps(value),
        }
        self.handle_report_metric_data(data)
        self._receive()

    def take_stops(self) -> "list[str]":
        """Return the ids of the trials that `KillTrialJob` named since the last call."""
        stops, self._to_stop = self._to_stop, []
        return stops

    def trial_end(self, parameter_id: int, success: bool, **kwargs: "Any") -> None:
        """See `Tuner`."""
        trial_job_id = kwargs["trial_job_id"]
        stopped = "EARLY_STOPPED" if trial_job_id in self._stopped else "FAILED"
        event = "SUCCEEDED" if success else stopped
        sent = json.dumps(self._trials.pop(parameter_id))
        self._sequences.pop(trial_job_id, None)
        self._stopped.discard(trial_job_id)
        self.handle_trial_end({"trial_job_id": trial_job_id, "event": event, "hyper_params": sent})
        self._receive()

    def import_data(self, data: "list[dict[str, Any]]") -> None:
        """See `Tuner`."""
        self.handle_import_data(data)
        self._receive()

    def _receive(self) -> None:
        """Process what was sent."""
        while _sent:
            name, data = _sent.pop(0)
            if name == "NewTrialJob":
                self._ready.append(json.loads(data))
            elif name == "Error":
                raise RuntimeError(data)
            elif name == "KillTrialJob":
                trial_job_id = str(json.loads(data))
                self._to_stop.append(trial_job_id)
                self._stopped.add(trial_job_id)
        while self._ready and self._missing and self._deliver is not None:
            parameter_id = self._missing.pop(0)
            self._deliver(parameter_id, self._give(parameter_id))

    def _give(self, parameter_id: int) -> "Any":
        self._trials[parameter_id] = sent = self._ready.pop(0)
        return sent["parameters"]
