"""A real manager authenticates keepers and responds to protocol violations."""

import grpc
import pytest
from attempts import attempt_id
from deadlines import DEADLINE_S
from real_experiment import wait_until

from nni_manager.domain.admission_errors import ProtocolError
from nni_manager.engine.keeper_admission import ProbeSession
from nni_manager.engine.tokens import token_of
from nni_manager.store.reader import StoreReader
from trial_keeper import __version__
from trial_keeper.wire.convert import keeper_messages_to_pb, manager_messages_from_pb
from trial_keeper.wire.messages import AttemptKey, Chunk, Hello, Stream, Welcome
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY
from trial_keeper.wire.v1.keeper_pb2 import ConnectRequest
from trial_keeper.wire.v1.keeper_pb2_grpc import KeeperServiceStub

WAITING = "import time\nimport nni_sdk as nni\nnni.get_next_parameter()\nnni.report_intermediate_result(1)\ntime.sleep(600)\n"


class ForgingClient:
    """A client that can send any message, valid or not."""

    def __init__(self, experiment):
        self.experiment = experiment
        self.job = experiment.get("/trials")[0]["id"]
        with StoreReader(experiment.folder.database) as reader:
            self.token = token_of(reader.experiment().secret, self.job)

    def hello(self, **fields):
        values = {"version": __version__, "experiment_id": "TESTEXPT", "job_id": self.job, "task": "main-0"}
        return Hello(**values | fields)

    def send(self, *messages, job=None, token=None):
        """Send messages, and return the manager's responses until the manager ends the stream."""
        metadata = ((JOB_KEY, job or self.job), (TOKEN_KEY, token or self.token))
        requests = [m if isinstance(m, ConnectRequest) else keeper_messages_to_pb([m]) for m in messages]
        with grpc.insecure_channel(f"127.0.0.1:{self.experiment.port + 1}") as channel:
            call = KeeperServiceStub(channel).Connect(iter(requests), metadata=metadata, timeout=DEADLINE_S)
            return [each for response in call for each in manager_messages_from_pb(response)]


@pytest.fixture
def forging_client(a_real_experiment):
    experiment = a_real_experiment(WAITING, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    wait_until(lambda: experiment.row_count() == 1, "the trial reports")
    return ForgingClient(experiment)


def refusal(forging_client, *messages, **metadata):
    with pytest.raises(grpc.RpcError) as caught:
        forging_client.send(*messages, **metadata)
    return caught.value.code(), caught.value.details()


def test_a_call_with_an_invalid_token_or_message_is_refused_with_a_reason_and_changes_nothing(forging_client):
    key = AttemptKey(forging_client.job, attempt_id(0), "main-0")
    hello = forging_client.hello(attempts=(key,))
    code = grpc.StatusCode
    cases = [
        (
            (hello,),
            {"token": "wröng".encode("latin-1").decode("ascii", "replace").replace("�", "?")},
            code.UNAUTHENTICATED,
            "token",
        ),
        ((forging_client.hello(job_id="other"),), {}, code.UNAUTHENTICATED, "token"),
        ((hello,), {"job": "other"}, code.UNAUTHENTICATED, "token"),
        ((forging_client.hello(experiment_id="OTHEREXP"),), {}, code.NOT_FOUND, "job"),
        ((forging_client.hello(version="0.5.9"),), {}, code.FAILED_PRECONDITION, "0.5.9"),
        (
            (forging_client.hello(attempts=(AttemptKey("other", attempt_id(0), "main-0"),)),),
            {},
            code.INVALID_ARGUMENT,
            "belongs to another job",
        ),
        (
            (forging_client.hello(attempts=(AttemptKey(forging_client.job, attempt_id(0), "../.."),)),),
            {},
            code.INVALID_ARGUMENT,
            "../..",
        ),
        ((Chunk(key, Stream.METRICS, 0, b"x"),), {}, code.INVALID_ARGUMENT, "before Hello"),
        ((hello, hello), {}, code.INVALID_ARGUMENT, "second Hello"),
        (
            (hello, Chunk(AttemptKey("other", attempt_id(0), "main-0"), Stream.METRICS, 0, b"x")),
            {},
            code.INVALID_ARGUMENT,
            "belongs to another job",
        ),
        ((hello, Chunk(key, Stream.METRICS, 10**9, b"x")), {}, code.ABORTED, "offset"),
        ((ConnectRequest(),), {}, code.INVALID_ARGUMENT, "its kind is unknown"),
    ]
    for messages, metadata, status, word in cases:
        got, details = refusal(forging_client, *messages, **metadata)
        assert (got, word in details) == (status, True), (messages, got, details)
        assert details.startswith("cannot")
    assert forging_client.experiment.row_count() == 1
    assert forging_client.experiment.get("/check-status") == {"status": "NO_MORE_TRIAL", "errors": []}


def test_a_probe_is_accepted_and_does_not_disconnect_the_keeper(forging_client):
    keepers = forging_client.experiment.summary()["keepers"]
    assert keepers == 1
    assert forging_client.send(forging_client.hello(is_probe=True)) == [Welcome(__version__)]
    status, details = refusal(forging_client, forging_client.hello(is_probe=True), token="wrong")
    assert (status, "token" in details) == (grpc.StatusCode.UNAUTHENTICATED, True)
    log = forging_client.experiment.folder.manager_log.read_text()
    assert "a probe of version" in log
    assert "disconnected" not in log
    assert forging_client.experiment.summary()["keepers"] == 1


def test_a_message_after_the_hello_of_a_probe_is_a_protocol_error():
    chunk = Chunk(AttemptKey("abcde", attempt_id(0), "main-0"), Stream.METRICS, 0, b"x")
    with pytest.raises(ProtocolError, match="cannot accept Chunk from a probe"):
        ProbeSession().receive(chunk)


def test_a_keeper_with_a_valid_token_receives_the_stored_offsets(forging_client):
    (key,) = forging_client.experiment.folder.workspace.attempts_of(forging_client.job)
    (welcome,) = forging_client.send(forging_client.hello(attempts=(key,)))
    assert isinstance(welcome, Welcome)
    assert welcome.version == __version__
    (attempt,) = welcome.attempts
    assert attempt.offsets == {
        Stream.METRICS: forging_client.experiment.stream(forging_client.job, Stream.METRICS).stat().st_size
    }
    assert not attempt.closed
