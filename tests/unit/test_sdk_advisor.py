"""The base class of advisors, which the manager calls like a tuner. The class turns these calls into commands."""

import enum
import json

import pytest

from nni_sdk import advisor
from nni_sdk.advisor import CommandType, MsgDispatcherBase, send


class Recording(MsgDispatcherBase):
    """Records all commands. It proposes parameters on request only if `answers` is true."""

    def __init__(self, answers=True):
        super().__init__("ws://ignored")
        self.answers, self.handled = answers, []

    def handle_initialize(self, data):
        self.handled.append(("initialize", data))
        send(CommandType.Initialized, "")

    def handle_update_search_space(self, data):
        self.handled.append(("space", data))

    def handle_request_trial_jobs(self, data):
        self.handled.append(("request", data))
        if self.answers:
            self.propose(len(self.handled))

    def propose(self, number, command=CommandType.NewTrialJob):
        self.send(command, json.dumps({"parameter_id": f"p{number}", "parameters": {"x": number}}))

    def handle_report_metric_data(self, data):
        self.handled.append(("metric", data))

    def handle_trial_end(self, data):
        self.handled.append(("end", data))

    def handle_import_data(self, data):
        self.handled.append(("import", data))


@pytest.fixture(autouse=True)
def nothing_sent():
    yield
    assert advisor._sent == []


def test_an_advisor_receives_the_calls_of_tuner_methods_as_commands():
    made = Recording()
    made.update_search_space({"x": 1})
    made.update_search_space({"x": 2})
    assert made.handled == [("initialize", {"x": 1}), ("space", {"x": 2})]
    assert made.generate_multiple_parameters([7, 8]) == [{"x": 3}, {"x": 4}]
    made.receive_trial_result(7, {"x": 3}, {"default": 0.5}, trial_job_id="aB3dE", customized=False)
    made.trial_end(7, True, trial_job_id="aB3dE")
    made.trial_end(8, False, trial_job_id="xY9zW")
    made.import_data([{"parameter": {}, "value": 1}])
    _, metric = made.handled[4]
    assert json.loads(metric.pop("value")) == {"default": 0.5}
    assert metric == {"parameter_id": "p3", "trial_job_id": "aB3dE", "type": "FINAL", "sequence": 0}
    ends = [data for name, data in made.handled if name == "end"]
    assert [(data["trial_job_id"], data["event"]) for data in ends] == [
        ("aB3dE", "SUCCEEDED"),
        ("xY9zW", "FAILED"),
    ]
    assert json.loads(ends[1]["hyper_params"]) == {"parameter_id": "p4", "parameters": {"x": 4}}
    assert made.handled[-1] == ("import", [{"parameter": {}, "value": 1}])


def test_an_advisor_receives_no_new_request_while_an_earlier_request_is_unanswered():
    made, delivered = Recording(answers=False), []

    def deliver(*given):
        delivered.append(given)

    made.update_search_space({})
    assert made.generate_multiple_parameters([0], st_callback=deliver) == []
    assert made.generate_multiple_parameters([1], st_callback=deliver) == []
    assert [name for name, _ in made.handled] == ["initialize", "request"]
    made.propose(5)
    made.propose(6)
    made.import_data([])
    assert delivered == [(0, {"x": 5})]
    assert made.generate_multiple_parameters([2], st_callback=deliver) == [{"x": 6}]


def test_an_advisor_accepts_the_command_types_of_the_nni_package():
    theirs = enum.Enum("CommandType", {"NewTrialJob": b"TR", "NoMoreTrialJobs": b"NO"})
    made = Recording(answers=False)
    made.update_search_space({})
    made.propose(1, theirs.NewTrialJob)
    made.send(theirs.NoMoreTrialJobs, "")
    assert made.generate_multiple_parameters([0]) == [{"x": 1}]


def test_the_intermediate_results_of_each_trial_are_numbered_separately():
    made = Recording()
    made.update_search_space({})
    made.generate_multiple_parameters([7, 8])
    for parameter_id, trial_job_id, value in (
        (7, "aB3dE", 0.5),
        (8, "xY9zW", {"default": 1}),
        (7, "aB3dE", 2),
    ):
        made.receive_intermediate_result(parameter_id, value, trial_job_id=trial_job_id)
    metrics = [data for name, data in made.handled if name == "metric"]
    assert {data["type"] for data in metrics} == {"PERIODICAL"}
    assert [(data["parameter_id"], data["sequence"], json.loads(data["value"])) for data in metrics] == [
        ("p2", 0, 0.5),
        ("p3", 0, {"default": 1}),
        ("p2", 1, 2),
    ]


def test_a_stop_by_an_advisor_is_delivered_once_and_the_trial_end_is_reported_as_early_stopped():
    made = Recording()
    made.update_search_space({})
    made.generate_multiple_parameters([7, 8])
    made.send(CommandType.KillTrialJob, '"aB3dE"')
    made.receive_intermediate_result(7, 0.5, trial_job_id="aB3dE")
    assert made.take_stops() == ["aB3dE"]
    assert made.take_stops() == []
    made.trial_end(7, False, trial_job_id="aB3dE")
    made.trial_end(8, False, trial_job_id="xY9zW")
    assert [data["event"] for name, data in made.handled if name == "end"] == ["EARLY_STOPPED", "FAILED"]


def test_an_error_command_raises_an_exception():
    made = Recording()
    made.send(CommandType.Error, "it broke")
    with pytest.raises(RuntimeError, match="it broke"):
        made.import_data([])


@pytest.mark.parametrize("name", ["initialize", "request_trial_jobs", "update_search_space", "import_data",
                                  "report_metric_data", "trial_end"])  # fmt: skip
def test_the_error_for_a_missing_handler_contains_the_name_of_the_handler(name):
    with pytest.raises(NotImplementedError, match=f"handle_{name}"):
        getattr(MsgDispatcherBase(), f"handle_{name}")({})


def test_the_error_for_a_missing_handler_contains_a_remedy():
    with pytest.raises(NotImplementedError, match="its class has no handle_initialize; define this method"):
        MsgDispatcherBase().update_search_space({"x": 1})


def test_late_parameters_of_an_advisor_are_delivered_with_the_next_command():
    delivered = []
    made = Recording(answers=False)
    made.update_search_space({"x": 1})
    assert made.generate_multiple_parameters([7], st_callback=lambda *given: delivered.append(given)) == []
    made.propose(1)
    made.update_search_space({"x": 2})
    assert delivered == [(7, {"x": 1})]
