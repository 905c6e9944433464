"""The keys that the engine reads as the file has them, on all platforms, in the terms of NNI's second schema.

Source: NNI v2.10, nni/experiment/config.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema, field_validator, model_validator

from nni_manager.config.diagnostics import shown
from nni_manager.config.schema import Schema, flag, line, must_be, refusal, text, whole
from nni_manager.config.units import duration_s
from nni_manager.domain.lost_jobs import LOST_NODE_TIMEOUT_S
from nni_manager.domain.objectives import OptimizeMode

STORED = "stored"
"""The context of values that were checked before: durations are in seconds, and a number of failures may be 0."""
# As many trials fail in a minute, and a script that is wrong fails in each of them.
FAIL_FAST = 10
_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I | re.A
)
REUSE_IDLE_TIMEOUT_S = 600.0
_NOT_BLANK = r"[^\x00-\x20\x7f]"
_MAIL_ADDRESS = r"^[^\x00-\x20\x7f@<>,;:\"]+@[^\x00-\x20\x7f@<>,;:\"]+$"


def _seconds(value: Any, info: ValidationInfo) -> float | None:
    is_stored = info.context == STORED and isinstance(value, int | float)
    return float(value) if is_stored else duration_s(value)


def _seconds_or(default_s: float) -> PlainValidator:
    """A duration that is never unset."""

    def validate(value: Any, info: ValidationInfo) -> float:
        seconds = _seconds(value, info)
        return default_s if seconds is None else seconds

    return PlainValidator(validate)


_DURATION = WithJsonSchema(
    {"anyOf": [{"type": "string", "pattern": r"^[1-9][0-9]{0,8}[smhd]$"}, {"type": "null"}]}
)
Duration = Annotated[float | None, PlainValidator(_seconds), _DURATION]
_IdleTimeout = Annotated[float, _seconds_or(REUSE_IDLE_TIMEOUT_S), _DURATION]
_LostNodeTimeout = Annotated[float, _seconds_or(LOST_NODE_TIMEOUT_S), _DURATION]
_MOST_FAILURES = 99_999


def _failures(value: Any, info: ValidationInfo) -> int:
    """The number of failures of `failFast`; 0: it is off."""
    if isinstance(value, bool):
        return FAIL_FAST if value else 0
    if not isinstance(value, int) or not (0 if info.context == STORED else 1) <= value <= _MOST_FAILURES:
        raise ValueError(value)
    return value


FailFast = Annotated[
    int,
    PlainValidator(_failures),
    WithJsonSchema(
        {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1, "maximum": _MOST_FAILURES}]}
    ),
]


def duration(example: str, default: float | None = None, **rules: Any) -> Any:
    """A field that must be a `Duration`."""
    return must_be("a whole number and one of s, m, h, d", example, default, kind="duration", **rules)


class ObjectiveKeys(Schema):
    """One of `objectives`: a metric of the final result."""

    metric: str = line("the name of a metric", "accuracy", since="0.7", about="a number of the final result")
    mode: OptimizeMode = must_be(
        "maximize or minimize", "maximize", since="0.7", about="the direction of the search"
    )


class ConstraintKeys(Schema):
    """One of `constraints`: bounds of a metric of the final result."""

    metric: str = line("the name of a metric", "size_mb", since="0.7", about="a number of the final result")
    at_most: float | None = must_be(
        "a number", "50", None, since="0.7", about="the largest valid number", allow_inf_nan=False
    )
    at_least: float | None = must_be(
        "a number", "1", None, since="0.7", about="the smallest valid number", allow_inf_nan=False
    )

    @model_validator(mode="after")
    def _is_satisfiable(self) -> ConstraintKeys:
        if self.at_most is None and self.at_least is None:
            raise refusal(
                f"cannot use the constraint of {shown(self.metric)}: it has no bound; write at_most, at_least or both"
            )
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            raise refusal(
                f"cannot use the constraint of {shown(self.metric)}: at_least {self.at_least:g} is above at_most "
                f"{self.at_most:g}; swap them"
            )
        return self


class NotificationKeys(Schema):
    """One of `notify`: a recipient, and what it is notified of. Webhook and mail server may contain logins."""

    # fmt: off
    command: str | None = line("a shell command", "./notify.sh", None, since="0.7",
        about="run by bash in the folder of the experiment file, with the notification as JSON at its standard input")
    webhook: str | None = must_be("an address with http:// or https://", "https://hooks.example.com/T0/B0", None, since="0.7",
        pattern=rf"^https?://{_NOT_BLANK}+$", repr=False, about="receives the notification as JSON, by POST")
    email: str | None = must_be("an e-mail address", "me@example.com", None, since="0.7",
        pattern=_MAIL_ADDRESS, about="receives the notification as an e-mail")
    smtp: str | None = must_be("an address with smtp:// or smtps://", "smtps://me:secret@mail.example.com", None, since="0.7",
        pattern=rf"^smtps?://{_NOT_BLANK}+$", repr=False, unset="`smtp://localhost`", about="the mail server for `email`")
    sender: str | None = must_be("an e-mail address", "me@example.com", None, since="0.7", pattern=_MAIL_ADDRESS,
        unset="the login of `smtp` if it is an address, else your name at this machine", about="the sender of the e-mail")
    events: list[Literal["end", "error"]] = must_be("a list of end and error", "[error]", ["end", "error"], since="0.7",
        unset="`[end, error]`",
        about="`end`: all trials have ended, or you have stopped the experiment. `error`: it cannot continue")
    failures: int | None = whole(1, 99999, "5", None, since="0.7", unset="not notified",
        about="notified as soon as so many trials have failed one after another")
    # fmt: on

    @field_validator("webhook", "smtp")
    @classmethod
    def _has_a_host(cls, url: str | None) -> str | None:
        if url is not None:
            parts = urlsplit(url)
            if not parts.hostname or parts.port == 0:  # `port` raises ValueError for an invalid number
                raise ValueError(url)
        return url

    @model_validator(mode="after")
    def _has_one_recipient(self) -> NotificationKeys:
        named = [name for name in ("command", "webhook", "email") if getattr(self, name) is not None]
        if len(named) != 1:
            found = f"it has {' and '.join(named)}" if named else "it has no recipient"
            raise refusal(
                f"cannot use an entry of notify: {found}; write one of command, webhook and email in each entry"
            )
        if self.email is None and (self.sender is not None or self.smtp is not None):
            raise refusal(
                "cannot use an entry of notify: smtp and sender are keys of an e-mail; remove them, or write email"
            )
        return self

    @property
    def recipient(self) -> str:
        """The recipient for messages, without secrets: the command, the webhook's host, or the e-mail address."""
        return self.command or self.email or f"the webhook at {urlsplit(self.webhook or '').hostname}"

    def without_secrets(self) -> NotificationKeys:
        """A copy for display, in which only the host of webhook and mail server is left."""
        urls = {name: url for name in ("webhook", "smtp") if (url := getattr(self, name)) is not None}
        return self.model_copy(update={name: _without_login(url) for name, url in urls.items()})


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}"


class SharedKeys(Schema):
    """What an experiment file says about every experiment. Durations are in seconds; `fail_fast` 0 starts all trials."""

    # fmt: off
    author_name: str = text("a name", "your name", only_v1=True, about="your name")
    experiment_name: str = text("a name", "digits",
        unset="required; in the second schema, the name of the file; in Python, that of the program", about="the name in lists")
    description: str | None = must_be("text", "what this searches for", None, since="0.6", about="text for people")
    trial_concurrency: int = whole(1, 99999, "2", about="the number of trials that run at a time")
    max_experiment_duration: Duration = duration("1h", v1="maxExecDuration", unset="no limit",
        about="the time after which no more trials are started. One whose job waits in a queue of the cluster still runs")
    max_trial_number: int | None = whole(1, 999999999, "20", None, v1="maxTrialNum", unset="no limit",
        about="the number of trials to start, including failed ones")
    max_trial_duration: Duration = duration("30m", unset="no limit",
        about="the maximum duration of one trial; then it is stopped")
    max_trial_retry: int = whole(0, 99, "2", 0, since="0.6",
        about="how often a trial is retried whose job or keeper the cluster lost")
    # Each restart is on the cluster's word; the limit only ends a trial that a crowded cluster would never let finish.
    max_preemptions: int = whole(0, 9999, "100", 100, since="0.7",
        about="how often a trial starts again whose job the cluster [preempted](changing-a-running-experiment.md#preemption); "
        "not counted as retries")
    lost_node_timeout: _LostNodeTimeout = duration("10m", LOST_NODE_TIMEOUT_S, since="0.7", unset="`5m`",
        about="how long a node of a job on a cluster may be not ready, and its keeper silent, until the job is lost")
    # NNI starts every trial, however many fail.
    fail_fast: FailFast = must_be(f"false, or a whole number from 1 to {_MOST_FAILURES}", "10", FAIL_FAST, since="0.7",
        about="after how many failed trials no more are started, if none has succeeded before: a script that is wrong fails "
        "in every trial. Failures of the cluster do not count. `false` starts all trials")
    nni_manager_ip: str | None = must_be("an IPv4 address or a host name", "10.0.0.1", None, unset="detected",
        about="where keepers on a cluster reach this machine; without effect where trials run here")
    debug: bool = flag("false", False, about="more log; and no version check, unless `versionCheck` is written")
    version_check: bool | None = flag("true", None, since="0.6", unset="`true`, with `debug` `false`",
        about="refuse a keeper whose version differs from the manager's in the first two numbers")
    log_level: Literal["trace", "debug", "info", "warning", "error", "fatal"] = must_be(
        "one of trace, debug, info, warning, error, fatal", "info", "info", about="the detail of the manager's log")
    log_collection: Literal["none", "http"] = must_be("none or http", "none", "none", since="0.6",
        about="`http`: trials' output is sent to the manager as well, at 5 MB/s at most while a trial runs, the rest when it "
        "has ended, and [1 GiB of each](limits.md). `none`: only metrics are sent")
    # In NNI, a reused job always exits after 600 idle seconds.
    reuse_idle_timeout: _IdleTimeout = duration("10m", REUSE_IDLE_TIMEOUT_S, since="0.6", unset="`10m`",
        about="with [reuse](reuse.md), how long a job waits for its next trial before it leaves")
    max_trials_per_job: int = whole(0, 999999999, "0", 0, since="0.6",
        about="with [reuse](reuse.md), after how many trials a job leaves and a new one is requested; `0`: never")
    warm_imports: list[str] = must_be("a list of module names", "[numpy, sklearn]", [], since="0.6",
        about="with [reuse](reuse.md), modules that trials find imported, see [warm starts](warm-starts.md)")
    initial_trials: list[dict[str, Any]] = must_be("a list of parameters of trials", "[{lr: 0.1}]", [], since="0.7",
        about="parameters of the first trials, values that you know to be good. The tuner receives their results, and they "
        "count in the number of trials. Values outside the search space are used, with a warning")
    objectives: list[ObjectiveKeys] = must_be("a list of objectives", "[{metric: accuracy, mode: maximize}]", [], since="0.7",
        unset="the reported number, `default`, in the tuner's `optimize_mode`",
        about="what the search is for, see [several objectives](objectives.md)")
    constraints: list[ConstraintKeys] = must_be("a list of constraints", "[{metric: size_mb, at_most: 50}]", [], since="0.7",
        about="bounds of metrics; a trial outside is [never the best](objectives.md#constraints)")
    notify: list[NotificationKeys] = must_be("a list of recipients", "[{email: me@example.com}]", [], since="0.7",
        about="recipients of [notifications](notifications.md) about the experiment's end, an error, or failed trials in a row")
    # fmt: on

    @field_validator("nni_manager_ip")
    @classmethod
    def _is_reachable(cls, text: str | None) -> str | None:
        if text is None:
            return None
        # A last label of digits means an address, which must be valid; anything else must be a valid DNS name.
        if not _HOST_NAME.fullmatch(text) or text.rpartition(".")[2].isdigit():
            return str(ipaddress.IPv4Address(text))
        return text

    @field_validator("warm_imports")
    @classmethod
    def _are_modules(cls, names: list[str]) -> list[str]:
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise refusal(f"{shown(name)} is not the name of a module; write names as after `import`")
        return names
