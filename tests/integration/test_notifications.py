"""Notifications of an experiment: real managers, a real mail server, and commands of the user."""

import contextlib
import json
import os
import shutil
import socket
import ssl
from email import message_from_bytes, policy

import pytest
from deadlines import DEADLINE_S
from mail_server import a_mail_server
from real_experiment import wait_until
from webhook import a_webhook

from nni_manager.cli.archive import save
from nni_manager.engine.profiles import configuration_view
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.store.certificate import Certificate

# A trial with x above 1 fails, and any other trial reports x.
TRAIN = """
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
if x > 1:
    raise SystemExit(f"x is {x}")
nni.report_final_result(x)
"""
ENDLESS = "import time; time.sleep(600)"


def an_experiment(make, xs, notify, **options):
    return make(
        TRAIN,
        **{"trialConcurrency": 1, "maxTrialNum": len(xs), "failFast": False, "notify": notify}
        | {"initialTrials": [{"x": x} for x in xs]}
        | options,
    )


def problem(experiment):
    return wait_until(lambda: experiment.summary().get("problems"), "the manager reports a problem")[0]


def test_a_webhook_is_notified_of_consecutive_failures_and_of_the_end_of_the_experiment(a_real_experiment):
    with a_webhook() as webhook:
        experiment = an_experiment(
            a_real_experiment, [2, 0.5, 3, 4, 5, 0.75], [{"webhook": webhook.url, "failures": 2}]
        )
        experiment.start()
        failures, end = webhook.next(), webhook.next()
        experiment.close()
        assert webhook.accepted.empty()
    assert failures["event"] == "failures"
    assert "Experiment tests (TESTEXPT) continues, but 2 trials in a row have failed" in failures["text"]
    assert "x is 4" in failures["text"]
    assert failures["experiment"]["status"] in ("RUNNING", "NO_MORE_TRIAL")
    assert end["event"] == "end"
    assert end["text"] == (
        "Experiment tests (TESTEXPT) is done. 2 of 6 trials succeeded, 4 failed, best result 0.75."
    )
    assert (end["experiment"]["id"], end["experiment"]["bestValue"]) == ("TESTEXPT", 0.75)


def test_a_notification_that_is_retried_arrives_before_later_notifications(a_real_experiment):
    with a_webhook(503) as webhook:
        experiment = an_experiment(a_real_experiment, [2, 3, 0.5], [{"webhook": webhook.url, "failures": 2}])
        experiment.start()
        events = [webhook.next()["event"], webhook.next()["event"]]
        experiment.close()
    assert events == ["failures", "end"]


def test_a_recipient_of_error_events_receives_only_the_error_of_the_experiment(a_real_experiment):
    with a_webhook() as errors, a_webhook() as ends:
        experiment = an_experiment(
            a_real_experiment,
            [2, 3],
            [{"webhook": errors.url, "events": ["error"]}, {"webhook": ends.url, "events": ["end"]}],
            failFast=1,
        )
        experiment.start()
        error = errors.next()
        assert error["event"] == "error"
        assert "has failed: cannot continue the search: the first trial failed" in error["text"]
        experiment.close()
        assert ends.accepted.empty()


def test_the_manager_of_a_stopped_experiment_sends_the_notification_before_it_exits(a_real_experiment):
    with a_webhook() as webhook:
        experiment = a_real_experiment(ENDLESS, trialConcurrency=1, notify=[{"webhook": webhook.url}])
        experiment.start()
        experiment.delete("/experiment")
        experiment.manager.wait(DEADLINE_S)
        assert webhook.accepted.get_nowait()["text"].startswith("Experiment tests (TESTEXPT) was stopped. ")


def test_a_notification_to_an_unavailable_webhook_is_retried(a_real_experiment):
    with a_webhook(503, 429) as webhook:
        an_experiment(a_real_experiment, [0.5], [{"webhook": webhook.url}]).start()
        assert webhook.next()["event"] == "end"
        assert webhook.refusals == 2


def test_a_notification_that_a_webhook_refuses_is_not_retried_and_the_error_hides_the_webhook_path(
    a_real_experiment,
):
    with a_webhook(404) as webhook:
        experiment = an_experiment(a_real_experiment, [0.5], [{"webhook": webhook.url}])
        experiment.start()
        assert problem(experiment) == (
            "cannot notify the webhook at 127.0.0.1: it answered with HTTP status 404; check the address"
        )
        log = experiment.folder.manager_log.read_text()
        assert (
            "dropped a notification for the webhook at 127.0.0.1: Experiment tests (TESTEXPT) is done." in log
        )
        assert "secret-path" not in log
        assert webhook.accepted.empty()


def test_a_webhook_with_an_invalid_host_name_is_reported_as_a_problem_and_the_experiment_continues(
    a_real_experiment,
):
    webhook = {"webhook": "http://hooks..example.com/secret-path", "events": ["end"]}
    experiment = an_experiment(a_real_experiment, [0.5], [webhook])
    experiment.start()
    assert problem(experiment) == (
        "cannot notify the webhook at hooks..example.com: its address is invalid; correct webhook in notify"
    )
    assert experiment.get("/summary")["status"] == "DONE"


def test_a_manager_exits_even_if_a_webhook_does_not_answer(a_real_experiment):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/secret-path"
        experiment = an_experiment(a_real_experiment, [0.5], [{"webhook": url}])
        experiment.start()
        connection, _ = silent.accept()
        with connection:
            experiment.delete("/experiment")
            experiment.manager.wait(DEADLINE_S)
    log = experiment.folder.manager_log.read_text()
    assert "dropped a notification for the webhook at 127.0.0.1: " in log
    assert "secret-path" not in log


def test_a_notification_command_runs_in_the_folder_of_the_experiment_file(a_real_experiment):
    experiment = an_experiment(
        a_real_experiment, [0.5], [{"command": "cat > received && mv received note.json"}]
    )
    experiment.start()
    path = experiment.code / "note.json"
    wait_until(path.exists, "the command has run")
    assert json.loads(path.read_text())["event"] == "end"


def test_a_failed_notification_command_is_reported_as_a_problem_that_names_the_output_file(a_real_experiment):
    experiment = an_experiment(a_real_experiment, [0.5], [{"command": "echo no such channel >&2; exit 3"}])
    experiment.start()
    output = experiment.folder.notifications_log
    assert problem(experiment) == (
        "cannot notify echo no such channel >&2; exit 3: the command ended with exit code 3; its output is in "
        f"{output}"
    )
    assert output.read_text() == "no such channel\n"


def test_a_hanging_notification_command_is_killed_with_its_child_processes(a_real_experiment, tmp_path):
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    # Each process of the command has the FIFO open for writing. A read returns end-of-file only after all of them have exited.
    held = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    experiment = an_experiment(
        a_real_experiment, [0.5], [{"command": f"exec 3> {fifo}; sleep 600 & sleep 600"}]
    )
    experiment.program = [
        "-c",
        "import sys; from nni_manager.engine import notifier; notifier.COMMAND_TIMEOUT_S = 2.0\n"
        "from nni_manager.__main__ import main; sys.exit(main())",
    ]
    experiment.start()
    assert "the command has not ended within 2 s and was killed" in problem(experiment)

    def is_at_the_end():
        with contextlib.suppress(BlockingIOError):
            return os.read(held, 1) == b""

    wait_until(is_at_the_end, "no process of the command is left")
    os.close(held)


# ---- e-mail


def test_the_subject_of_an_email_contains_the_final_state_of_the_experiment(a_real_experiment):
    with a_mail_server() as (mails, port):
        notify = [{"email": "me@example.com", "smtp": f"smtp://me%40example.com:p%3Aw@127.0.0.1:{port}"}]
        an_experiment(a_real_experiment, [0.5], notify, experimentName="größte Suche").start()
        envelope = mails.received.get(timeout=DEADLINE_S)
    assert mails.logins == [(b"me@example.com", b"p:w")]
    assert (envelope.mail_from, envelope.rcpt_tos) == ("me@example.com", ["me@example.com"])
    message = message_from_bytes(envelope.content, policy=policy.default)
    assert message["subject"] == "Experiment größte Suche (TESTEXPT) is done"
    assert "1 of 1 trials succeeded, 0 failed, best result 0.5." in message.get_content()
    assert "nnictl trial ls TESTEXPT" in message.get_content()


def test_an_email_is_sent_over_tls_to_a_server_with_a_valid_certificate(a_real_experiment, tmp_path):
    certificate = Certificate.of(tmp_path / "tls.pem", {"127.0.0.1", "localhost"})
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.path)
    with a_mail_server(context=context) as (mails, port):
        notify = [
            {"email": "me@example.com", "sender": "it@example.com", "smtp": f"smtps://127.0.0.1:{port}"}
        ]
        untrusted = an_experiment(a_real_experiment, [0.5], notify)
        untrusted.start()
        assert "certificate verify failed" in problem(untrusted)
        untrusted.close()
        assert mails.received.empty()
        trusted = an_experiment(a_real_experiment, [0.5], notify)
        trusted.environ["SSL_CERT_FILE"] = str(certificate.path)
        trusted.start()
        envelope = mails.received.get(timeout=DEADLINE_S)
        assert (envelope.mail_from, envelope.rcpt_tos) == ("it@example.com", ["me@example.com"])


RAISING = """
from nni.tuner import Tuner
class Raising(Tuner):
    def update_search_space(self, space): ...
    def generate_parameters(self, number, **_):
        raise KeyError("lr")
"""


def test_the_subject_of_an_email_about_a_traceback_is_one_line(a_real_experiment):
    with a_mail_server() as (mails, port):
        a_real_experiment(
            TRAIN,
            notify=[{"email": "me@example.com", "smtp": f"smtp://127.0.0.1:{port}"}],
            tuner={"codeDir": ".", "classFileName": "mine.py", "className": "Raising"},
            files={"mine.py": RAISING},
        ).start()
        envelope = mails.received.get(timeout=DEADLINE_S)
    message = message_from_bytes(envelope.content, policy=policy.default)
    assert message["subject"].startswith("Experiment tests (TESTEXPT) has failed: ")
    assert "KeyError: 'lr'" in message.get_content()


def test_a_notification_delivered_to_one_recipient_does_not_hide_the_problem_of_another_recipient(
    a_real_experiment,
):
    with a_webhook(404) as refusing, a_webhook() as accepting:
        notify = [{"webhook": refusing.url}, {"webhook": accepting.url}]
        experiment = an_experiment(a_real_experiment, [0.5], notify)
        experiment.start()
        assert accepting.next()["event"] == "end"
        assert "HTTP status 404" in problem(experiment)


@pytest.mark.parametrize(
    ("host", "login", "email", "why"),
    [
        (
            "127.0.0.1",
            "me:wrong@",
            "me@example.com",
            "refused the login (535); check the name and password in smtp",
        ),
        ("127.0.0.1", "m%C3%BC:p%3Aw@", "me@example.com", "the e-mail cannot be written"),
        ("127.0.0.1", "", "nobody@example.com", "refused the recipient (550 no such user); check email"),
        (
            "127.0.0.2",
            "me:p%3Aw@",
            "me@example.com",
            "127.0.0.2 has no STARTTLS, which a login needs; write smtps:// in smtp",
        ),
    ],
)
def test_an_undeliverable_email_is_reported_as_a_problem_with_a_remedy(
    a_real_experiment, host, login, email, why
):
    with a_mail_server(host) as (mails, port):
        notify = [{"email": email, "smtp": f"smtp://{login}{host}:{port}"}]
        experiment = an_experiment(a_real_experiment, [0.5], notify)
        experiment.start()
        assert why in problem(experiment)
        assert mails.received.empty()
    if host != "127.0.0.1":
        assert mails.logins == []


# ---- secrets


def test_secret_parts_of_notification_addresses_are_neither_shown_nor_saved(a_real_experiment, tmp_path):
    notify = [
        {"webhook": "https://hooks.example.com/T0/secret-path", "events": ["error"]},
        {"email": "me@example.com", "smtp": "smtps://me:secret-login@mail.example.com", "events": ["error"]},
    ]
    experiment = an_experiment(a_real_experiment, [0.5], notify)
    experiment.start()
    experiment.wait_for_status("DONE", is_stored=True)
    shown = json.dumps([experiment.get(path) for path in ("/experiment", "/configuration", "/summary")])
    assert "hooks.example.com" in shown
    assert "secret-" not in shown
    experiment.close()
    assert "secret-" not in configuration_view(ExperimentSnapshot.stored(experiment.folder))["text"]
    save(experiment.folder, tmp_path / "saved.tgz", has_code=False)
    shutil.unpack_archive(tmp_path / "saved.tgz", tmp_path / "unpacked", "gztar")
    for path in (tmp_path / "unpacked").rglob("*"):
        assert not path.is_file() or b"secret-" not in path.read_bytes(), path
        assert not path.is_file() or b"hooks.example.com" not in path.read_bytes(), path
