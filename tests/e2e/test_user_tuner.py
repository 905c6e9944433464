"""Whole experiments with a user's own tuner and assessor, and with PBTTuner's checkpoints."""

import json

import pytest
from real_experiment import wait_until

from nni_manager.store.reader import StoreReader

TRAIN = """
import nni_sdk
n = nni_sdk.get_next_parameter()["n"]
nni_sdk.report_intermediate_result({"acc": n})
nni_sdk.report_final_result({"default": n, "extra": "kept"})
"""
MINE = """
from nni.assessor import Assessor, AssessResult
from nni.tuner import Tuner
import nni

class Mine(Tuner):
    def __init__(self, optimize_mode, most):
        self.most, self.results = most, []
    def update_search_space(self, search_space):
        assert search_space["n"]["_type"] == "randint"
    def generate_parameters(self, parameter_id, **kwargs):
        if parameter_id >= self.most:
            raise nni.NoMoreTrialError
        print("results so far", self.results, flush=True)
        return {"n": self.check(parameter_id)}
    def check(self, n):
        return MISTAKE
    def receive_trial_result(self, parameter_id, parameters, value, **kwargs):
        assert len(kwargs["trial_job_id"]) == 5
        self.results.append([parameter_id, parameters["n"], value["extra"]])

class Judge(Assessor):
    def assess_trial(self, trial_job_id, trial_history):
        print("seen", trial_history, flush=True)
        return AssessResult.Good
"""


def test_an_experiment_can_be_resumed_after_the_user_has_fixed_the_tuner(a_real_experiment):
    experiment = a_real_experiment(
        TRAIN,
        space={"n": {"_type": "randint", "_value": [0, 9]}},
        trialConcurrency=1,
        maxTrialNum=9,
        tuner={
            "codeDir": ".",
            "className": "mine.Mine",
            "classArgs": {"optimize_mode": "minimize", "most": 4},
        },
        assessor={"codeDir": ".", "classFileName": "mine.py", "className": "Judge"},
        files={"mine.py": MINE.replace("MISTAKE", "n if n < 2 else {}['no such key']")},
    )
    experiment.start()
    error = "".join(experiment.wait_for_status("ERROR")["errors"])
    assert "the tuner mine.Mine failed, and no more trials are started" in error
    assert "KeyError: 'no such key'" in error
    name = experiment.folder.experiment_id
    assert (
        f"end the manager with `nnictl stop {name}` if it still runs, and resume with `nnictl resume {name}`"
        in error
    )
    assert "user_worker" not in error.split("Traceback")[0]
    experiment.kill_manager()

    (experiment.code / "mine.py").write_text(MINE.replace("MISTAKE", "n"))
    experiment.start()
    experiment.wait_for_status("DONE", is_stored=True)
    experiment.close()
    with StoreReader(experiment.folder.database) as reader:
        trials = reader.trials()
    assert [(trial.parameters["n"], trial.state.value) for trial in trials] == [
        (n, "SUCCEEDED") for n in range(4)
    ]
    heard = (experiment.folder.log / "tuner.log").read_text().splitlines()
    assert heard[-1] == "results so far [[0, 0, 'kept'], [1, 1, 'kept'], [2, 2, 'kept']]"
    assert (experiment.folder.log / "assessor.log").read_text().splitlines()[-1] == "seen [{'acc': 3}]"


ITS_OWN = """
from nni.tuner import Tuner

class Mine(Tuner):
    def update_search_space(self, search_space):
        self.space = search_space
    def generate_parameters(self, parameter_id, **kwargs):
        return {"n": parameter_id, "space": self.space}
    def receive_trial_result(self, parameter_id, parameters, value, **kwargs):
        pass
"""


@pytest.mark.parametrize("space", [None, {"n": {"from": 0, "to": 9}}], ids=["none", "its own form"])
def test_a_user_tuner_receives_the_search_space_unchanged(a_real_experiment, space):
    experiment = a_real_experiment(
        TRAIN,
        maxTrialNum=2,
        tuner={"codeDir": ".", "className": "mine.Mine"},
        files={"mine.py": ITS_OWN, "own.json": json.dumps(space)},
        searchSpacePath="own.json" if space else None,
    )
    experiment.start()
    experiment.wait_for_status("DONE")
    experiment.kill_manager()
    # The manager may have been killed before it stored the state DONE. Then the restarted manager stores this state.
    experiment.start()
    assert experiment.wait_for_status("DONE", is_stored=True)["counts"]["SUCCEEDED"] == 2
    with StoreReader(experiment.folder.database) as reader:
        assert [trial.parameters for trial in reader.trials()] == [
            {"n": number, "space": space or {}} for number in range(2)
        ]


GOES_ON = """
import json, os, nni_sdk
given = nni_sdk.get_next_parameter()
try:
    epochs = json.load(open(given["load_checkpoint_dir"] + "/model.json"))
except FileNotFoundError:
    epochs = []
os.makedirs(given["save_checkpoint_dir"])
json.dump([*epochs, given["x"]], open(given["save_checkpoint_dir"] + "/model.json", "w"))
nni_sdk.report_final_result({"default": given["x"], "epochs": [*epochs, given["x"]]})
"""


@pytest.mark.smoke
def test_pbt_trials_continue_from_the_checkpoint_of_the_best_trial(a_real_experiment):
    args = {"population_size": 2, "fraction": 0.5, "optimize_mode": "maximize", "seed": 3}
    experiment = a_real_experiment(
        GOES_ON,
        trialConcurrency=2,
        maxTrialNum=6,
        tuner={"builtinTunerName": "PBTTuner", "classArgs": args},
    )
    experiment.start()
    experiment.wait_for_status("DONE", is_stored=True)
    experiment.close()
    with StoreReader(experiment.folder.database) as reader:
        trials = reader.trials()
    epochs = [json.loads(trial.run.final)["epochs"] for trial in trials]
    generations = [{tuple(each) for each in epochs if len(each) == length} for length in (1, 2, 3)]
    assert [len(each) for each in generations] == [2, 2, 2]
    best = max(generations[0])
    assert {each[:1] for each in generations[1]} == {best}, "both must continue from the better one"


# These are the modules that an advisor imports: "v1" has the names of NNI v1.9, "v2" those of v2.10 and later versions.
IMPORTS = {
    "v1": "from nni.msg_dispatcher_base import MsgDispatcherBase\nfrom nni.protocol import CommandType, send\n",
    "v2": "from nni.runtime.msg_dispatcher_base import MsgDispatcherBase\n"
    "from nni.runtime.tuner_command_channel import CommandType\nfrom nni_sdk.advisor import send\n",
}
ADVISOR = """
import json
from nni.utils import MetricType, extract_scalar_reward

class Halving(MsgDispatcherBase):
    '''Proposes two trials, and sends the next one only when one of them has ended.'''
    def __init__(self, optimize_mode):
        super().__init__()
        self.results, self.count = {}, 0
    def handle_initialize(self, data):
        self.handle_update_search_space(data)
        send(CommandType.Initialized, "")
    def handle_update_search_space(self, data):
        self.most = data["n"]["_value"][1]
    def handle_request_trial_jobs(self, data):
        for _ in range(data):
            if self.count < 2 or self.results:
                self.new_trial()
            else:
                self.owes = True
    def new_trial(self):
        if self.count < self.most:
            self.count += 1
            trial = {"parameter_id": 100 + self.count, "parameters": {"n": self.count}, "parameter_source": "algorithm"}
            self.send(CommandType.NewTrialJob, json.dumps(trial))
        else:
            self.send(CommandType.NoMoreTrialJobs, "")
    def handle_report_metric_data(self, data):
        if data["type"] == MetricType.FINAL:
            self.results[data["parameter_id"]] = extract_scalar_reward(json.loads(data["value"]))
    def handle_trial_end(self, data):
        sent = json.loads(data["hyper_params"])
        print("ended", data["event"], len(data["trial_job_id"]), sent["parameter_id"], self.results, flush=True)
        if getattr(self, "owes", False):
            self.owes = False
            self.new_trial()
    def handle_import_data(self, data):
        pass
"""


def printed_by_the_advisor(experiment, ends):
    """The lines that the advisor printed. Waits for `ends` reports of trial ends, because the experiment may be done before the
    advisor receives the last one.
    """

    def lines():
        found = (experiment.folder.log / "tuner.log").read_text().splitlines()
        return found if sum(line.startswith("ended") for line in found) >= ends else None

    return wait_until(lines, f"the advisor has received {ends} ends")


@pytest.mark.parametrize("names", ["v1", "v2"])
def test_an_experiment_with_a_user_defined_advisor_runs_to_its_end_and_resumes(a_real_experiment, names):
    experiment = a_real_experiment(
        TRAIN,
        space={"n": {"_type": "randint", "_value": [0, 5]}},
        trialConcurrency=3,
        maxTrialNum=9,
        tuner=None,
        advisor={
            "codeDir": ".",
            "classFileName": "mine.py",
            "className": "Halving",
            "classArgs": {"optimize_mode": "maximize"},
        },
        files={"mine.py": IMPORTS[names] + ADVISOR},
    )
    experiment.start()
    experiment.wait_for_status("DONE")
    trials = experiment.get("/trials")
    assert sorted(trial["parameters"]["n"] for trial in trials) == [1, 2, 3, 4, 5]
    assert {trial["status"] for trial in trials} == {"SUCCEEDED"}
    heard = printed_by_the_advisor(experiment, 5)
    assert len(heard) == 5
    assert heard[0].startswith("ended SUCCEEDED 5 10")
    assert heard[-1].count(":") == 5
    experiment.kill_manager()
    experiment.start()
    experiment.wait_for_status("DONE")
    assert len(experiment.get("/trials")) == 5


STOPPING = """
import json
from nni.utils import MetricType

class Stopping(MsgDispatcherBase):
    '''Proposes n from 0 on; stops trial 0, trials 1 and 2 when both have reported, and one that does not exist.'''
    def __init__(self):
        super().__init__()
        self.count, self.ids = 0, {}
    def handle_initialize(self, data):
        send(CommandType.Initialized, "")
    def handle_request_trial_jobs(self, data):
        for _ in range(data):
            self.send(CommandType.NewTrialJob, json.dumps({"parameter_id": self.count, "parameters": {"n": self.count}}))
            self.count += 1
    def handle_report_metric_data(self, data):
        print(data["type"], data["parameter_id"], data["sequence"], data["value"], flush=True)
        if data["type"] == MetricType.PERIODICAL:
            n = data["parameter_id"]
            self.ids[n] = data["trial_job_id"]
            stops = [self.ids[0]] if n == 0 else []
            if {1, 2} <= self.ids.keys():
                stops += [self.ids[1], self.ids[2], "nobody"]
            for each in stops:
                send(CommandType.KillTrialJob, json.dumps(each))
    def handle_trial_end(self, data):
        print("ended", data["event"], json.loads(data["hyper_params"])["parameters"]["n"], flush=True)
"""
RUNS_ON = """
import signal
import nni
n = nni.get_next_parameter()["n"]
nni.report_intermediate_result({"default": n, "extra": 1})
if n < 3:
    signal.pause()
nni.report_final_result(n)
"""


@pytest.mark.parametrize("names", ["v1", "v2"])
def test_a_user_defined_advisor_receives_intermediate_results_and_stops_trials(a_real_experiment, names):
    experiment = a_real_experiment(
        RUNS_ON,
        space={},
        trialConcurrency=2,
        maxTrialNum=4,
        tuner=None,
        advisor={"codeDir": ".", "classFileName": "mine.py", "className": "Stopping"},
        files={"mine.py": IMPORTS[names] + STOPPING},
    )
    experiment.start()
    experiment.wait_for_status("DONE")
    trials = experiment.get("/trials")
    assert {trial["parameters"]["n"]: trial["status"] for trial in trials} == {
        **dict.fromkeys((0, 1, 2), "EARLY_STOPPED"),
        3: "SUCCEEDED",
    }
    printed = printed_by_the_advisor(experiment, 4)
    assert sorted(line for line in printed if line.startswith("ended")) == [
        *(f"ended EARLY_STOPPED {n}" for n in (0, 1, 2)),
        "ended SUCCEEDED 3",
    ]
    assert 'PERIODICAL 3 0 {"default": 3, "extra": 1}' in printed
    assert "FINAL 3 0 3" in printed
