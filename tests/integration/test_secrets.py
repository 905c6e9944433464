"""No file, response or process that other users can read contains a secret of an experiment."""

import json
import stat

import psutil
import pytest
import requests
from deadlines import DEADLINE_S
from real_experiment import wait_until
from strangers import session_of_another_user

from nni_manager.engine.tokens import api_token_of, token_of
from nni_manager.store.reader import StoreReader
from trial_keeper.wire.messages import Stream

TRAIN = """
import os, time
import nni_sdk as nni
nni.get_next_parameter()
print(dict(os.environ))
nni.report_intermediate_result(1)
time.sleep(600)
"""
GOES_ON = ("RUNNING", "NO_MORE_TRIAL")
PATHS = [
    "/version", "/check-status", "/summary", "/experiment", "/experiment-metadata", "/job-statistics", "/trials",
    "/metric-data", "/metric-data-latest", "/metric-data-range/0/9", "/export-data", "/changes", "/jobs",
    "/experiments", "/configuration",
]  # fmt: skip


@pytest.fixture
def running(a_real_experiment):
    experiment = a_real_experiment(TRAIN, trialConcurrency=1, maxTrialNum=1, logCollection="http", debug=True)
    experiment.is_forked = False  # a test reads the keeper's command line, and a fork has none of its own
    experiment.start()
    wait_until(lambda: experiment.row_count() == 1, "the trial reports")
    return experiment


def secrets_of(experiment):
    with StoreReader(experiment.folder.database) as reader:
        secret = reader.experiment().secret
        jobs = [job.job_id for job in reader.jobs()[0]]
    assert jobs
    tokens = {token_of(secret, job) for job in jobs}
    return tokens | {api_token_of(secret), secret.hex()}


def test_files_with_secrets_are_readable_only_by_their_owner(running):
    secrets = secrets_of(running)
    assert len(secrets) == 3

    def holds_one(text):
        return any(secret in text for secret in secrets)

    trial_id = running.get("/trials")[0]["id"]
    for path in [
        *PATHS,
        f"/trials/{trial_id}",
        f"/trials/{trial_id}/usage",
        f"/metric-data/{trial_id}",
    ]:
        answer = running.ask("GET", path)
        assert answer.status_code == 200, path
        assert not holds_one(answer.text + str(answer.headers)), path

    assert b"NNI_SYS_DIR" in running.stream(trial_id, Stream.STDOUT).read_bytes()
    holders = {
        path.relative_to(running.folder.path).as_posix()
        for path in running.folder.path.rglob("*")
        if path.is_file() and holds_one(path.read_bytes().decode("latin-1"))
    }
    assert holders == {"manager-process.json"}  # the database contains the secret as bytes, not as hex
    private = ["", "manager-process.json", "db/experiment.sqlite", "owner.lock"]
    for path in private:
        mode = stat.S_IMODE((running.folder.path / path).stat().st_mode)
        assert mode == (0o600 if path else 0o700), path

    # Every user can read the command lines of all processes with `ps`, and the trial's code can read its own environment. So
    # neither may contain a secret.
    trial = None
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            assert not holds_one(" ".join(words))
            if words[-1:] == ["train.py"] and process.environ().get("NNI_TRIAL_JOB_ID") == trial_id:
                trial = process
                assert not holds_one(str(process.environ()))
                assert not any(name.startswith("TRIAL_KEEPER_") for name in process.environ())
        except psutil.Error:
            continue
    assert trial is not None


def test_requests_without_the_token_are_refused_and_stop_no_trial(running):
    url = f"http://127.0.0.1:{running.port}/api/v1/nni"
    trial_id = running.get("/trials")[0]["id"]
    another = session_of_another_user()
    for path in [*PATHS, f"/trials/{trial_id}", "/no-such-path"]:
        assert another.get(url + path, timeout=DEADLINE_S).status_code == 401, path
    for path in ("/experiment", f"/trial-jobs/{trial_id}"):
        assert another.delete(url + path, timeout=DEADLINE_S).status_code == 401, path
        foreign = running.ask("DELETE", path, headers={"Origin": "http://evil.example"})
        assert foreign.status_code == 403, path
    assert running.get("/summary")["status"] in GOES_ON
    assert running.get(f"/trials/{trial_id}")["status"] in GOES_ON


def test_a_resumed_manager_keeps_its_token_and_certificate_and_keepers_reconnect(running):
    before = running.folder.process()
    assert before.certificate_sha256 is None
    running.kill_manager()
    running.start(host="0.0.0.0")
    beyond = running.folder.process()
    assert beyond.token == before.token
    assert beyond.certificate_sha256 is not None
    assert running.summary()["status"] in GOES_ON
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{running.port}/api/v1/nni/version", timeout=DEADLINE_S)
    document = json.loads(running.folder.workspace.manager_json.read_bytes())
    assert document["certificate"] is None  # Keepers connect over loopback, without TLS.
    wait_until(lambda: running.summary()["keepers"] == 1, "the keeper has reconnected")
    assert stat.S_IMODE((running.folder.path / "tls.pem").stat().st_mode) == 0o600
    running.kill_manager()
    running.start(host="0.0.0.0")
    assert running.folder.process().certificate_sha256 == beyond.certificate_sha256
