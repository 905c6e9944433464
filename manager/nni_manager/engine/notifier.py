"""Delivers the notifications of an experiment: runs commands, posts to webhooks and sends e-mails. docs/notifications.md.

Each recipient is notified independently, and in the order of the events. Delivery is tried again for an hour while a recipient
cannot be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from nni_manager.config.model import ExperimentSpec
from nni_manager.config.shared_keys import NotificationKeys
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.notifications import Notification, NotificationEvent, Notifications
from nni_manager.domain.trial import Trial
from nni_manager.support.backoff import delays_s
from nni_manager.support.daemon_threads import in_daemon_thread
from trial_keeper.timeouts import set_within

log = logging.getLogger(__name__)

_FIRST_WAIT_S, _MAX_WAIT_S = 1.0, 60.0
_MAX_RETRY_S = 3600.0
COMMAND_TIMEOUT_S = 60.0
# Longer than webhooks and mail servers are waited for. `nnictl stop` waits for the manager's exit.
_CLOSE_TIMEOUT_S = 15.0
_DROPPED = "dropped a notification for %s: %s"


class _Undelivered(Exception):
    """Why a recipient was not notified. `is_final`: another try would end in the same way."""

    def __init__(self, why: str, *, is_final: bool) -> None:
        super().__init__(why)
        self.is_final = is_final


class Notifier:
    """The notifications of one manager."""

    def __init__(
        self,
        config: ExperimentSpec,
        state: ExperimentState,
        log_file: Path,
        describe: Callable[[], dict[str, Any]],
        after_save: Callable[[Callable[[], None]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """`state`: that of the experiment before this manager starts it. `log_file`: receives the output of commands.

        `describe`: the experiment as in lists. `after_save` calls a function when all decisions so far are stored. `spawn` runs
        a task.
        """
        self._problems: dict[int, str] = {}
        """By the `id` of a recipient: why its latest notification was not delivered, with the remedy."""
        self._recipients = config.notify
        self._folder = config.config_path.parent
        self._log_file = log_file
        self._describe = describe
        self._after_save = after_save
        self._notifications = Notifications(
            {each.failures for each in config.notify if each.failures is not None}, state
        )
        self._spawn = spawn
        self._deliveries: set[asyncio.Task[None]] = set()
        self._turns = {id(each): asyncio.Lock() for each in config.notify}
        """By the `id` of a recipient: held by the delivery of its earliest notification. The others wait in their order."""
        self._is_closing = asyncio.Event()

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the latest notifications of recipients were not delivered, with the remedies."""
        return tuple(self._problems.values())

    def note_state(self, state: ExperimentState, error: str) -> None:
        """Notify of the experiment's state once it is stored, if somebody wants to know of it."""
        self._notify(self._notifications.of_state(state, error))

    def note_end(self, trial: Trial) -> None:
        """Notify of failures in a row once this trial's end is stored, if somebody wants to know of them."""
        self._notify(self._notifications.of_end(trial))

    async def close(self) -> None:
        """Wait for deliveries in progress, at most 15 s. Nothing is tried again."""
        self._is_closing.set()
        if self._deliveries:
            await asyncio.wait(self._deliveries, timeout=_CLOSE_TIMEOUT_S)

    def _notify(self, notification: Notification | None) -> None:
        if notification is None:
            return
        recipients = [each for each in self._recipients if _wants(each, notification)]
        if recipients:
            self._after_save(lambda: self._deliver_to(recipients, notification))

    def _deliver_to(self, recipients: list[NotificationKeys], notification: Notification) -> None:
        experiment = self._describe()
        headline = f"Experiment {experiment['experimentName']} ({experiment['id']}) {notification.text}"
        message = {
            "event": notification.event.value,
            "text": f"{headline}. {_summary(experiment)}",
            "experiment": experiment,
        }
        for each in recipients:
            # An error of user code has a traceback. An e-mail's subject has no line break of any kind.
            task = self._spawn(self._deliver(each, headline.splitlines()[0], message))
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)

    async def _deliver(self, recipient: NotificationKeys, subject: str, message: dict[str, Any]) -> None:
        deadline_s = time.monotonic() + _MAX_RETRY_S
        try:
            async with self._turns[id(recipient)]:
                await self._deliver_in_turn(recipient, subject, message, deadline_s)
        except asyncio.CancelledError:
            log.warning(_DROPPED, recipient.recipient, message["text"])
            raise

    async def _deliver_in_turn(
        self, recipient: NotificationKeys, subject: str, message: dict[str, Any], deadline_s: float
    ) -> None:
        waits_s = delays_s(_FIRST_WAIT_S, _MAX_WAIT_S)
        while True:
            try:
                await self._send(recipient, subject, message)
            except _Undelivered as error:
                self._problems[id(recipient)] = f"cannot notify {recipient.recipient}: {error}"
                log.warning("%s", self._problems[id(recipient)])
                if error.is_final or self._is_closing.is_set() or time.monotonic() >= deadline_s:
                    log.warning(_DROPPED, recipient.recipient, message["text"])
                    return
            else:
                self._problems.pop(id(recipient), None)
                log.info("notified %s: %s", recipient.recipient, message["event"])
                return
            await set_within(self._is_closing, next(waits_s))

    async def _send(self, recipient: NotificationKeys, subject: str, message: dict[str, Any]) -> None:
        if recipient.command is not None:
            await self._run(recipient.command, json.dumps(message))
        elif recipient.webhook is not None:
            await in_daemon_thread(_post, recipient.webhook, json.dumps(message), name="webhook")
        else:
            await in_daemon_thread(_send_mail, recipient, subject, message, name="mail")

    async def _run(self, command: str, message: str) -> None:
        """Run a command of the user; its group is killed at the timeout."""
        remedy = f"its output is in {self._log_file}"
        try:
            with self._log_file.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *("bash", "-c", command),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    cwd=self._folder,
                    start_new_session=True,
                )
        except OSError as error:
            raise _Undelivered(
                f"{error.strerror}: {error.filename}; create or install it", is_final=True
            ) from error
        try:
            await asyncio.wait_for(process.communicate(message.encode()), COMMAND_TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError):
            why = f"the command has not ended within {COMMAND_TIMEOUT_S:g} s and was killed; {remedy}"
            raise _Undelivered(why, is_final=True) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode != 0:
            raise _Undelivered(
                f"the command ended with exit code {process.returncode}; {remedy}", is_final=True
            )


def _wants(recipient: NotificationKeys, notification: Notification) -> bool:
    if notification.event is NotificationEvent.FAILURES:
        return recipient.failures == notification.failures
    return notification.event.value in recipient.events


def _summary(experiment: dict[str, Any]) -> str:
    total, failed = experiment["trialCount"], experiment["failedCount"]
    best = f", best result {experiment['bestValue']:.6g}" if "bestValue" in experiment else ""
    return f"{experiment['succeededCount']} of {total} trials succeeded, {failed} failed{best}."


# The libraries of the following functions are imported only by experiments that notify somebody.
def _post(url: str, body: str) -> None:
    import requests

    from nni_manager.support.webhook import post_json

    try:
        status = post_json(url, body)
    except requests.exceptions.InvalidURL:
        raise _Undelivered("its address is invalid; correct webhook in notify", is_final=True) from None
    except requests.RequestException as error:
        # The error's text contains the address, which is often a secret.
        why = f"there is no answer ({type(error).__name__}); check the address and the network"
        raise _Undelivered(why, is_final=False) from None
    if status >= 400:
        is_final = status < 500 and status != 429
        raise _Undelivered(f"it answered with HTTP status {status}; check the address", is_final=is_final)


def _send_mail(recipient: NotificationKeys, subject: str, message: dict[str, Any]) -> None:
    import smtplib

    from nni_manager.support.mail import LoginNeedsEncryption, send_mail

    assert recipient.email is not None
    server = recipient.smtp or "smtp://localhost"
    text = f"{message['text']}\n\nTo see its trials: nnictl trial ls {message['experiment']['id']}\n"
    try:
        send_mail(server, recipient.sender, recipient.email, subject, text)
    except LoginNeedsEncryption as error:
        raise _Undelivered(f"{error}; write smtps:// in smtp", is_final=True) from None
    except smtplib.SMTPAuthenticationError as error:
        why = f"the mail server refused the login ({error.smtp_code}); check the name and password in smtp"
        raise _Undelivered(why, is_final=True) from None
    except smtplib.SMTPRecipientsRefused as error:
        code, answer = next(iter(error.recipients.values()))
        why = f"the mail server refused the recipient ({code} {answer.decode(errors='replace')}); check email"
        raise _Undelivered(why, is_final=code >= 500) from None
    except smtplib.SMTPResponseException as error:
        why = f"the mail server answered {error.smtp_code} {error.smtp_error!r}; check smtp and sender"
        raise _Undelivered(why, is_final=error.smtp_code >= 500) from None
    except OSError as error:
        why = f"the mail server cannot be used ({error}); check smtp"
        raise _Undelivered(why, is_final=False) from None
    except (KeyError, ValueError) as error:
        # An invalid host name or login, or this process's user has no name.
        why = f"the e-mail cannot be written ({error}); check smtp, and set sender"
        raise _Undelivered(why, is_final=True) from None
