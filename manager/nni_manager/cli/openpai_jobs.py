"""nnictl openpai: jobs on any OpenPAI cluster, also those that trial-keeper did not submit."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nni_manager.cli.openpai import openpai
from nni_manager.cli.options import COUNT, FILE, Command, example, json_option
from nni_manager.client import output
from nni_manager.errors import RetryableError, UserError
from trial_keeper.wire.safe_open import read_named

if TYPE_CHECKING:
    from nni_manager.training_services.openpai.render import RenderedJob
    from nni_manager.training_services.openpai.rest import JobStatus, OpenPai, TaskStatus

# OpenPAI's log manager serves at most 1 MB/s, and its REST server accepts 600 calls a minute.
_FOLLOW_INTERVAL_S = 2.0
# The log of a task that has just started appears within this time.
_LOG_TIMEOUT_S = 60.0
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")

OpenCluster = Callable[[], "OpenPai"]


def _open_cluster(host: str | None, user: str | None, token: str | None, config: Path | None) -> OpenPai:
    """The selected cluster. Options take precedence, then the experiment file, the environment, and the local OpenPAI.

    Raises:
        UserError: the cluster, the user or the login is not given.
        ConfigInvalid: the experiment file is invalid.
    """
    from nni_manager.local_openpai.platform import running_here
    from nni_manager.training_services.openpai.platform import platform
    from nni_manager.training_services.openpai.rest import OpenPai
    from nni_manager.training_services.openpai.section import LOCAL_HOST, PaiConfig
    from nni_manager.training_services.retry_policy import ClientRetryPolicy

    retry_policy = ClientRetryPolicy(tries=3)
    if config is not None:
        from nni_manager.config.reader import read_experiment_file

        experiment = read_experiment_file(config, reads_code=False)
        pai = experiment.cluster
        if not isinstance(pai, PaiConfig):
            raise UserError(
                f"cannot use --config {config}: the experiment does not run on OpenPAI; give --host, --user and --token"
            )
        meant = dataclasses.replace(
            pai, host=host or pai.host, user=user or pai.user, token=token or pai.token
        )
        return platform(experiment.replace(cluster=meant)).open_cluster(retry_policy=retry_policy)
    host = host or os.environ.get("OPENPAI_HOST")
    if host is None or host.lower() == LOCAL_HOST:
        here = running_here(retry_policy)
        if here is not None and not (user or token):
            return here
        host = host if here is None else here.address
    user = user or os.environ.get("OPENPAI_USER")
    token = token or os.environ.get("OPENPAI_TOKEN")
    password = None if token else os.environ.get("OPENPAI_PASSWORD")
    if host is None or user is None or (token or password) is None:
        raise UserError(
            "cannot connect to OpenPAI: host, user or token is missing; give --config with an experiment file, or set "
            "OPENPAI_HOST, OPENPAI_USER and OPENPAI_TOKEN (or give --host, --user and --token), or run `nnictl openpai start`"
        )
    return OpenPai(host, user, token=token, password=password, retry_policy=retry_policy)


def _on_a_cluster(command: Command) -> Command:
    """Adds the options that select a cluster; the command receives a function that connects to it."""

    @functools.wraps(command)
    def with_cluster(
        host: str | None, user: str | None, token: str | None, config: Path | None, **rest: Any
    ) -> Any:
        return command(functools.partial(_open_cluster, host, user, token, config), **rest)

    made: Command = with_cluster
    for option in (
        click.option("--token", metavar="TOKEN", help="Your token. Prefer OPENPAI_TOKEN, which other users cannot see."),
        click.option("--user", metavar="USER", help="Your account.  [default: OPENPAI_USER]"),
        click.option("--host", metavar="HOST", help="The cluster.  [default: OPENPAI_HOST]"),
        click.option(
            "--config", "-c", metavar="FILE", type=FILE, help="An experiment file with host, user and login."
        ),
    ):  # fmt: skip
        made = option(made)
    return made


_job = click.argument("job", metavar="JOB")
_file = click.argument("file", metavar="FILE", type=FILE)


def _text_of(file: Path) -> str:
    from nni_manager.config.document import MAX_BYTES

    try:
        return read_named(file, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"cannot read {file}: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from error


# ---- submit


@openpai.command(epilog=example("nnictl openpai submit job.yml --config config.yml"))
@_on_a_cluster
@_file
@click.option("--tag", "tags", metavar="TAG", multiple=True, help="A tag for the job. Repeatable.")
@json_option
def submit(open_cluster: OpenCluster, file: Path, tags: Sequence[str], as_json: bool) -> None:
    """Submit a job file."""
    _refuse_commas(tags)
    text = _text_of(file)
    job = _checked(text, str(file))
    cluster = open_cluster()
    cluster.submit(text)
    name = job.protocol.name
    for tag in tags:
        cluster.tag(name, tag)
    if as_json:
        warnings = [str(warning) for warning in job.warnings]
        output.print_json({"name": name, "user": cluster.user, "warnings": warnings})
        return
    for warning in job.warnings:
        output.warning(str(warning))
    output.info(f"OpenPAI has accepted job {name}; `nnictl openpai show {name}` shows its state")


@openpai.command(epilog=example("nnictl openpai validate job.yml", "nnictl openpai validate job.yml --json"))
@_file
@json_option
def validate(file: Path, as_json: bool) -> int:
    """Validate a job file, more strictly than OpenPAI does.

    Needs no cluster. The exit code is 1 if the job cannot run.
    """
    from nni_manager.training_services.openpai.job_checks import ProtocolInvalid

    text = _text_of(file)
    if not as_json:
        job = _checked(text, str(file))
        for warning in job.warnings:
            output.warning(str(warning))
        roles = ", ".join(f"{each.role.name} × {each.role.instances}" for each in job.roles)
        output.info(f"{file} can run: job {job.protocol.name}, {roles}")
        return 0
    try:
        found, kind = _checked(text, str(file)).warnings, "warning"
    except ProtocolInvalid as error:
        found, kind = error.diagnostics, "mistake"
    output.print_json(
        [
            {"kind": kind, "line": each.line, "column": each.column, "key": each.key, "message": each.message}
            for each in found
        ]
    )
    return 1 if kind == "mistake" else 0


def _refuse_commas(tags: Sequence[str]) -> None:
    for tag in tags:
        if "," in tag:
            raise UserError(f"cannot use --tag {tag}: tags of OpenPAI contain no comma; repeat --tag")


def _checked(text: str, file: str) -> RenderedJob:
    from nni_manager.training_services.openpai.protocol import parse
    from nni_manager.training_services.openpai.render import render

    return render(parse(text, file))


# ---- show


@openpai.command(
    "jobs",
    epilog=example("nnictl openpai jobs --state RUNNING,WAITING", "nnictl openpai jobs --keyword nni_exp"),
)
@_on_a_cluster
@click.option(
    "--state", "states", metavar="STATES", default="", help="Only jobs in these states, separated by commas."
)
@click.option("--keyword", metavar="TEXT", default="", help="Only jobs whose name contains TEXT.")
@click.option(
    "--tag", "tags", metavar="TAG", multiple=True, help="Only jobs with this tag, or one of several."
)
@click.option("--all-users", is_flag=True, help="Also jobs of other users.")
@click.option("--head", type=COUNT, metavar="N", help="Only the newest N jobs.")
@json_option
def list_jobs(
    open_cluster: OpenCluster,
    states: str,
    keyword: str,
    tags: Sequence[str],
    all_users: bool,
    head: int | None,
    as_json: bool,
) -> None:
    """List jobs, newest first."""
    from nni_manager.training_services.openpai.rest import PaiJobState

    known = [state.value for state in PaiJobState]
    wanted = [word.strip().upper() for word in states.split(",") if word.strip()]
    unknown = [word for word in wanted if word not in known]
    if unknown:
        raise UserError(f"cannot use --state {unknown[0]}: there is no such state; use {', '.join(known)}")
    cluster = open_cluster()
    _refuse_commas(tags)
    rows = cluster.jobs(
        keyword=keyword,
        states=[PaiJobState(word) for word in wanted],
        tags=tags,
        user=None if all_users else "",
    )[:head]
    if as_json:
        output.print_json([row.document for row in rows])
        return
    if not rows:
        output.info(f"There is no such job at {cluster.address}")
        return
    headings = ["job", "user", "state", "submitted", "took", "virtual cluster", "retries"]
    cells = [
        [
            row.name,
            row.user,
            str(row.document.get("state", "")),
            output.moment(row.document.get("submissionTime")),
            _took(row.document),
            str(row.document.get("virtualCluster", "")),
            str(row.document.get("retries", "")),
        ]
        for row in rows
    ]
    output.print_list(headings, cells)


@openpai.command(epilog=example("nnictl openpai show nni_exp_GvTf2bVe_trial_aB3dE --config config.yml"))
@_on_a_cluster
@_job
@json_option
def show(open_cluster: OpenCluster, job: str, as_json: bool) -> None:
    """Show a job: its state, the reason for its end, its tasks."""
    cluster = open_cluster()
    detail = cluster.job(job)
    if as_json:
        output.print_json(detail.document)
        return
    status = detail.document.get("jobStatus") or {}
    explained = status.get("appExitSpec") or {}
    lines = {
        "job": f"{detail.user}~{detail.name}",
        "state": str(status.get("state", "")),
        "virtual cluster": str(status.get("virtualCluster", "")),
        "submitted": output.moment(status.get("submissionTime")),
        "took": _took(status),
        "exit code": "" if detail.exit_code is None else str(detail.exit_code),
        "reason": detail.reason,
        "cause": str(explained.get("reason") or ""),
        "remedy": "; ".join(map(str, explained.get("solution") or [])),
    }
    width = max(map(len, lines)) + 2
    for name, value in lines.items():
        if value:
            output.plain(f"{name:<{width}}{value}")
    cells = [
        [
            task.name,
            str(task.document.get("taskState", "")),
            str(task.document.get("containerIp") or ""),
            "" if task.document.get("containerExitCode") is None else str(task.document["containerExitCode"]),
            str(task.document.get("retries", "")),
        ]
        for task in detail.tasks
    ]
    if cells:
        output.plain()
        output.print_table(["task", "state", "address", "exit code", "retries"], cells)
    for message in dict.fromkeys(str(each.get("message", "")) for each in cluster.events(job, "Warning")):
        output.warning(message)


@openpai.command(epilog=example("nnictl openpai events train --type Warning"))
@_on_a_cluster
@_job
@click.option("--type", "kind", type=click.Choice(["Normal", "Warning"]), help="Only events of this type.")
@json_option
def events(open_cluster: OpenCluster, job: str, kind: str | None, as_json: bool) -> None:
    """List the events of a job, oldest first: its warnings, and what the cluster did with it."""
    cluster = open_cluster()
    found = cluster.events(job, kind)
    if as_json:
        output.print_json(found)
        return
    if not found:
        output.info(f"Job {job} has no events at {cluster.address}")
        return
    headings = ["time", "type", "reason", "task", "message"]
    cells = [
        [
            output.moment(_ms(each.get("lastTimestamp"))),
            str(each.get("type", "")),
            str(each.get("reason", "")),
            "" if each.get("taskroleName") is None else f"{each['taskroleName']}-{each.get('taskIndex')}",
            str(each.get("message", "")),
        ]
        for each in found
    ]
    output.print_list(headings, cells)


@openpai.command(epilog=example("nnictl openpai export train --config config.yml --output job.yml"))
@_on_a_cluster
@_job
@click.option(
    "--output", "-o", "target", metavar="FILE", type=FILE, help="Write to this file instead of stdout."
)
def export(open_cluster: OpenCluster, job: str, target: Path | None) -> None:
    """Print a job as a job file. Its secrets are masked: fill in your own before you submit it again."""
    text = open_cluster().config(job)
    if target is None:
        output.plain(text.rstrip("\n"))
        return
    if target.exists():
        raise UserError(f"cannot write {target}: the file exists already; name another file, or remove it")
    with output.naming(target):
        target.write_text(text)
    output.info(f"wrote {target}")


# ---- stop


@openpai.command(epilog=example("nnictl openpai stop train", "nnictl openpai stop alice~train"))
@_on_a_cluster
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
def stop(open_cluster: OpenCluster, jobs: Sequence[str]) -> None:
    """Stop jobs. Containers that still run after 30 s are killed."""
    cluster = open_cluster()
    for job in jobs:
        cluster.stop(job)
        output.info(f"Stopping job {job}; `nnictl openpai show {job}` shows when it has ended")


# ---- logs


@openpai.command(
    epilog=example(
        "nnictl openpai logs train", "nnictl openpai logs train --task worker-1 --stream stderr -f"
    )
)
@_on_a_cluster
@_job
@click.option("--task", metavar="ROLE-N", help="The task.  [default: the first one]")
@click.option(
    "--stream",
    metavar="NAME",
    default="all",
    show_default=True,
    help="stdout, stderr, all, or another log of the task.",
)
@click.option("--follow", "-f", is_flag=True, help="Also print new output, until the job ends.")
def logs(open_cluster: OpenCluster, job: str, task: str | None, stream: str, follow: bool) -> None:
    """Print the log of a task of a job."""
    from nni_manager.training_services.openpai.connection import JobNotOnCluster, RequestRejected

    cluster = open_cluster()
    seen: tuple[int, int] | None = None
    printed, deadline_s = 0, time.monotonic() + _LOG_TIMEOUT_S
    while True:
        detail = cluster.job(job)
        is_terminal = detail.document.get("jobStatus", {}).get("state") in _ENDED
        try:
            shown = _task(detail, task)
            if seen != (detail.attempt, shown.attempt):
                # A new attempt starts from the start of its own log.
                seen, printed = (detail.attempt, shown.attempt), 0
            locations = cluster.log_locations(detail, shown)
            if stream not in locations:
                raise UserError(
                    f"cannot show {stream} of {shown.name}: there is no such log; use {', '.join(locations) or 'another task'}"
                )
            piece = cluster.log(locations[stream], printed)
            printed += len(piece)
            deadline_s = float("inf")
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
        except (JobNotOnCluster, RequestRejected, _NotYet) as error:
            if is_terminal or not follow or time.monotonic() > deadline_s:
                raise UserError(str(error)) from error
        except RetryableError as error:
            if not follow:
                raise
            output.warning(str(error))
        if is_terminal or not follow:
            return
        time.sleep(_FOLLOW_INTERVAL_S)


class _NotYet(UserError):
    """cannot show a log yet: the job has no tasks; wait until it runs"""


def _task(detail: JobStatus, wanted: str | None) -> TaskStatus:
    """The wanted task; None: the first one."""
    tasks = {task.name: task for task in detail.tasks}
    if not tasks:
        raise _NotYet(f"cannot show a log of job {detail.name} yet: it has no tasks; wait until it runs")
    if wanted is None:
        return next(iter(tasks.values()))
    if wanted not in tasks:
        raise UserError(f"cannot find task {wanted!r} of job {detail.name}; use one of {', '.join(tasks)}")
    return tasks[wanted]


def _took(document: Any) -> str:
    started_ms = document.get("launchedTime") or document.get("createdTime")
    if started_ms is None:
        return ""
    return output.duration((document.get("completedTime") or time.time() * 1000) / 1000 - started_ms / 1000)


def _ms(at: str | float | None) -> float | None:
    """The time of an event: ISO 8601; from a local OpenPAI before 0.7 milliseconds since the epoch."""
    return datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp() * 1000 if isinstance(at, str) else at
