"""The delivery of notifications: which failures are retried, and for how long."""

import asyncio
import socket
from types import SimpleNamespace

import pytest
from mail_server import a_mail_server
from real_experiment import RealExperiment, wait_until
from webhook import a_webhook

from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine import notifier as notifier_module
from nni_manager.engine.notifier import Notifier

pytestmark = pytest.mark.slow

EXPERIMENT = {"id": "exp", "experimentName": "digits", "trialCount": 3, "succeededCount": 1, "failedCount": 2}


def run_notifier(folder, recipients, scenario):
    """Await `scenario` with the notifier of a running experiment, and with the tasks of its deliveries."""

    async def run():
        config = RealExperiment(folder, "pass\n", notify=recipients).config
        deliveries = []

        def spawn(delivery):
            deliveries.append(asyncio.create_task(delivery))
            return deliveries[-1]

        output = folder / "notifications.log"
        notifier = Notifier(
            config, ExperimentState.RUNNING, output, lambda: EXPERIMENT, lambda call: call(), spawn
        )
        await scenario(notifier, deliveries)
        await notifier.close()

    asyncio.run(run())


async def problem_of(notifier):
    return await asyncio.to_thread(wait_until, lambda: notifier.problems, "the notifier has a problem")


def is_given_up(folder, recipient):
    """Whether the first failure of a delivery to this recipient is the last try."""
    found = []

    async def scenario(notifier, deliveries):
        notifier.note_state(ExperimentState.DONE, "")
        await problem_of(notifier)
        found.append(deliveries[0].done())

    run_notifier(folder, [recipient], scenario)
    return found[0]


@pytest.mark.parametrize(
    ("status", "is_final"), [(400, True), (404, True), (429, False), (499, True), (500, False), (503, False)]
)
def test_a_delivery_to_a_webhook_is_retried_only_after_a_status_for_overload_or_a_server_error(
    tmp_path, status, is_final
):
    with a_webhook(status, status) as webhook:
        assert is_given_up(tmp_path, {"webhook": webhook.url}) is is_final
        assert webhook.accepted.empty()


@pytest.mark.parametrize(
    ("login", "sender", "email", "is_final"),
    [
        ("", "it", "busy", False),
        ("", "it", "nobody", True),
        ("", "busy", "me", False),
        ("", "nobody", "me", True),
        ("me:wrong@", "it", "me", True),
        ("m%C3%BC:p%3Aw@", "it", "me", True),
    ],
)
def test_a_delivery_to_a_mail_server_is_retried_only_after_a_temporary_error(
    tmp_path, login, sender, email, is_final
):
    with a_mail_server() as (mails, port):
        recipient = {
            "email": f"{email}@example.com",
            "sender": f"{sender}@example.com",
            "smtp": f"smtp://{login}127.0.0.1:{port}",
        }
        assert is_given_up(tmp_path, recipient) is is_final
        assert mails.received.empty()


def test_a_mail_that_needs_a_password_over_an_unencrypted_connection_is_refused_and_not_retried(tmp_path):
    with a_mail_server("127.0.0.2") as (mails, port):
        recipient = {"email": "me@example.com", "smtp": f"smtp://me:p%3Aw@127.0.0.2:{port}"}
        assert is_given_up(tmp_path, recipient)
        assert mails.logins == []


@pytest.mark.parametrize(
    "recipient",
    [
        {"webhook": "http://127.0.0.1:{}"},
        {"email": "me@example.com", "sender": "it@example.com", "smtp": "smtp://127.0.0.1:{}"},
    ],
)
def test_a_delivery_to_an_unreachable_recipient_is_retried(tmp_path, unused_port, recipient):
    recipient = {key: value.format(unused_port) for key, value in recipient.items()}
    assert not is_given_up(tmp_path, recipient)


def test_a_failed_command_is_not_run_again(tmp_path):
    assert is_given_up(tmp_path, {"command": "exit 3"})


def test_a_command_that_cannot_be_started_is_not_retried(tmp_path, monkeypatch):
    # The notifier runs commands with bash. This PATH has no bash, so the command cannot be started.
    monkeypatch.setenv("PATH", str(tmp_path))
    assert is_given_up(tmp_path, {"command": "true"})


def test_the_problem_of_a_recipient_disappears_after_a_successful_delivery(tmp_path):
    async def scenario(notifier, deliveries):
        notifier.note_state(ExperimentState.DONE, "")
        await problem_of(notifier)
        await asyncio.gather(*deliveries)
        assert webhook.accepted.qsize() == 1
        assert notifier.problems == ()

    with a_webhook(503) as webhook:
        run_notifier(tmp_path, [{"webhook": webhook.url}], scenario)


def test_a_delivery_to_an_unavailable_recipient_is_retried_for_an_hour(tmp_path, monkeypatch):
    async def scenario(notifier, deliveries):
        notifier.note_state(ExperimentState.DONE, "")
        await asyncio.gather(*deliveries)
        assert (webhook.refusals, webhook.accepted.qsize()) == (2, 0)
        assert len(notifier.problems) == 1

    # The delivery starts at 100 s. Its first failure, at 3699 s, is within the hour and its second, at 3701 s, is not.
    times_s = iter([100.0, 3699.0, 3701.0])
    monkeypatch.setattr(notifier_module, "time", SimpleNamespace(monotonic=lambda: next(times_s)))
    with a_webhook(503, 503) as webhook:
        run_notifier(tmp_path, [{"webhook": webhook.url}], scenario)


def test_close_immediately_retries_the_delivery_to_an_unavailable_recipient_for_the_last_time(
    tmp_path, monkeypatch
):
    async def scenario(notifier, deliveries):
        notifier.note_state(ExperimentState.DONE, "")
        await problem_of(notifier)
        await notifier.close()
        assert deliveries[0].done()
        assert (webhook.refusals, webhook.accepted.qsize()) == (2, 0)

    # The usual delay before a retry becomes an hour, so only close() can cause the second delivery within the deadline of the
    # test.
    monkeypatch.setattr(notifier_module, "delays_s", lambda *_: iter([3600.0] * 9))
    with a_webhook(503, 503) as webhook:
        run_notifier(tmp_path, [{"webhook": webhook.url}], scenario)


def test_an_unresponsive_webhook_delays_neither_the_close_of_the_notifier_nor_the_exit_of_the_process(
    tmp_path, monkeypatch
):
    async def scenario(notifier, deliveries):
        notifier.note_state(ExperimentState.DONE, "")
        accepted.append((await asyncio.to_thread(silent.accept))[0])

    accepted = []
    monkeypatch.setattr(notifier_module, "_CLOSE_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run_notifier(tmp_path, [{"webhook": f"http://127.0.0.1:{silent.getsockname()[1]}/"}], scenario)
        with accepted[0] as connection:
            connection.setblocking(False)
            connection.recv(1 << 16)
            # The socket has no data and no end-of-file, so the connection is open: the client waits for its response. The close
            # of the notifier has not waited for the thread of the client.
            with pytest.raises(BlockingIOError):
                connection.recv(1)


def test_a_recipient_is_notified_of_failures_only_after_its_own_number_of_consecutive_failures(tmp_path):
    async def scenario(notifier, deliveries):
        for number in range(2):
            trial = Trial(f"t{number}", number, {}, {}, 0.0, None)
            trial.state = TrialState.FAILED
            notifier.note_end(trial)
        notifier.note_state(ExperimentState.DONE, "")
        await asyncio.gather(*deliveries)
        assert [(await asyncio.to_thread(two.next))["event"] for _ in range(2)] == ["failures", "end"]
        assert (await asyncio.to_thread(five.next))["event"] == "end"
        assert two.accepted.empty()
        assert five.accepted.empty()

    with a_webhook() as two, a_webhook() as five:
        recipients = [{"webhook": two.url, "failures": 2}, {"webhook": five.url, "failures": 5}]
        run_notifier(tmp_path, recipients, scenario)
