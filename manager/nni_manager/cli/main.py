"""nnictl: the commands, and how each kind of mistake is told."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from nni_manager.cli import changes, openpai_jobs, output
from nni_manager.cli.client import api_url
from nni_manager.cli.experiments import (
    KnownExperiment,
    beginning_with,
    garbage_bytes,
    known_experiments,
    resolve,
    spoilt_lines,
    stored_status,
)
from nni_manager.cli.openpai import openpai
from nni_manager.errors import NniManagerError, UserMistake
from trial_keeper import __version__
from trial_keeper.wire.own_files import NotOwnFile, open_inside

if TYPE_CHECKING:
    from trial_keeper.wire.messages import AttemptKey

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_COMMANDS = (
    ("nnictl experiment show", "show the information of experiments"),
    ("nnictl trial ls", "list all of trial jobs"),
    ("nnictl top", "monitor the status of running experiments"),
    ("nnictl log stderr", "show stderr log content"),
    ("nnictl log stdout", "show stdout log content"),
    ("nnictl stop", "stop an experiment"),
    ("nnictl trial kill", "kill a trial job by id"),
    ("nnictl --help", "get help information about nnictl"),
)


def main() -> None:
    """The console script."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, _interrupt)
    sys.exit(run(sys.argv[1:]))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run(arguments: Sequence[str]) -> int:
    """Do what a command line says; the exit code. Every mistake of the user is one line on stderr and exit code 1."""
    try:
        code = cli.main(list(arguments), prog_name="nnictl", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 1
    except click.UsageError as error:
        output.error(usage_line(error))
        return 1
    except NniManagerError as error:
        for line in _lines(error):
            output.error(line)
        return 1
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except OSError as error:
        if output.is_hangup(error):
            # Nobody reads any more (`nnictl trial ls | head -1`): no reason to complain, and nobody to complain to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        output.error(
            f"cannot use {error.filename or 'a file'}: {error.strerror or error}; mend that and try again"
        )
        return 1
    return code if isinstance(code, int) else 0


def _lines(error: NniManagerError) -> list[str]:
    # Files with several mistakes have a line for each.
    return str(error).splitlines() if hasattr(error, "mistakes") else [str(error)]


def usage_line(error: click.UsageError) -> str:
    """A mistake of the command line as one sentence from "cannot" to the way out."""
    path = error.ctx.command_path if error.ctx is not None else "nnictl"
    near: Sequence[str] = ()
    match error:
        case click.exceptions.NoSuchCommand():
            what, near = f"cannot find the command {path} {error.command_name}", error.possibilities or ()
        case click.exceptions.NoSuchOption():
            what, near = f"cannot use option {error.option_name} of {path}", error.possibilities or ()
        case click.exceptions.MissingParameter() if error.param is not None:
            hint = error.param.get_error_hint(error.ctx) if error.ctx is not None else error.param.name
            what = f"cannot do without {str(hint).replace(chr(39), '')}"
        case _:
            message = error.format_message().rstrip(".")
            _, found, own = message.partition(": cannot ")
            what = f"cannot {own}" if found else f"cannot read this command line: {message}"
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{what}; {hint}`{path} --help` shows what there is"


# ---- parts of commands


class _Port(click.ParamType[Any]):
    """A port number, or `auto` as None."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """The number."""
        from nni_manager.cli.preflight import HIGHEST_PORT

        if value == "auto":
            return None
        if not str(value).isdecimal() or not 1 <= int(value) <= HIGHEST_PORT:
            self.fail(f"cannot use --port {value}: it is no number from 1 to {HIGHEST_PORT} and not auto")
        return int(value)


_Command = Callable[..., Any]


def _start_options(command: _Command) -> _Command:
    for option in (
        click.option("--foreground", "-f", is_flag=True, help="Show progress, wait for the end, then stop."),
        click.option("--debug", "-d", is_flag=True, help="Log more, and check no versions."),
        click.option(
            "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
            help="Where the HTTP API listens. Beyond this machine it speaks HTTPS.",
        ),
        click.option(
            "--port", "-p", type=_Port(), default="8080", show_default=True, metavar="N|auto",
            help="Port of the HTTP API; keepers use the next one. auto: the first two that are free.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


_experiment = click.argument("experiment_id", metavar="[ID]", required=False)
_json_anyway = click.option("--json", is_flag=True, expose_value=False, help="Print JSON, as it does anyway.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def _example(*lines: str) -> str:
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


@click.group(context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 110})
@click.version_option(__version__, "--version", "-v", message="nnictl %(version)s")
def cli() -> None:
    """Run hyper-parameter experiments.

    An ID may be shortened to its beginning, and left out when exactly one experiment runs.

    \b
    Example:
      nnictl create --config config.yml --foreground
    """
    return


cli.add_command(openpai)
for _command in openpai_jobs.COMMANDS:
    openpai.add_command(_command)


# ---- create, resume, stop, top


@cli.command(epilog=_example("nnictl create --config config.yml", "nnictl create -c config.yml -p auto -f"))
@click.option(
    "--config",
    "-c",
    "config_path",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path),
    help="The experiment file.",
)
@_start_options
def create(config_path: Path, host: str, port: int | None, debug: bool, foreground: bool) -> int:
    """Start a new experiment."""
    import secrets

    from nni_manager.cli import manager_process, preflight
    from nni_manager.config.reader import read_experiment_file

    config = read_experiment_file(config_path)
    if debug:
        config = dataclasses.replace(config, debug=True, version_check=False)
    place = preflight.check_platform(config)
    ports = _ports(port, host)
    for expansion in config.expansions:
        output.info(f"expand {expansion.key}: {expansion.written} to {expansion.absolute}")
    for warning in (*config.warnings, *place.warnings):
        output.warning(warning)
    if place.where:
        output.info(f"run jobs on {place.where}")
    if config.pai is not None:
        from nni_manager.engine.code_snapshot import size_of

        size = size_of(config.code_dir, config.pai.storage, config.secret_files)
        output.info(f"pack codeDir {config.code_dir} for the containers: {size}")
    if config.is_annotated:
        output.info(
            f"copy codeDir {config.code_dir} for the trials, with chosen values in the place of annotated ones"
        )
    output.info("Starting restful server...")
    known = manager_process.create_experiment(config, secrets.token_bytes(32), ports, debug, host)
    return _after_start(known, foreground)


@cli.command(epilog=_example("nnictl resume GvTf2bVe", "nnictl resume GvTf2bVe --foreground"))
@click.argument("experiment_id", metavar="ID")
@_start_options
def resume(experiment_id: str, host: str, port: int | None, debug: bool, foreground: bool) -> int:
    """Go on with an experiment whose manager does not run."""
    from nni_manager.cli import manager_process

    known = resolve(experiment_id)
    name = known.experiment_id
    if known.manager is not None:
        raise UserMistake(
            f"cannot resume experiment {name}: it runs on port {known.manager.port}; "
            f"watch it with `nnictl top {name}`, or stop it first with `nnictl stop {name}`"
        )
    if known.view is not None:
        # The manager shows the same and more, most often on the same port.
        manager_process.end_view(known)
        output.info(f"Ended the view of experiment {name} on port {known.view.port}")
    ports = _ports(port, host)
    output.info("Starting restful server...")
    return _after_start(manager_process.start_manager(known.folder, ports, debug, host), foreground)


@cli.command(epilog=_example("nnictl view GvTf2bVe", "nnictl view GvTf2bVe --port 8090 --foreground"))
@click.argument("experiment_id", metavar="ID")
@click.option("--foreground", "-f", is_flag=True, help="Serve until Ctrl-C, or until somebody ends the view.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Where the HTTP API listens. Beyond this machine it speaks HTTPS.",
)
@click.option("--port", "-p", type=_Port(), default="8080", show_default=True, metavar="N|auto",
              help="Port of the HTTP API. auto: the first that is free.")  # fmt: skip
def view(experiment_id: str, host: str, port: int | None, foreground: bool) -> int:
    """Serve what is stored of an experiment, to be looked at and not changed."""
    from nni_manager.cli import manager_process

    known = resolve(experiment_id)
    name, server = known.experiment_id, known.manager or known.view
    if server is not None:
        how = "runs" if known.manager else "is viewed"
        output.info(f"Experiment {name} {how} already: it is served at {api_url(server)}")
        return 0
    known = manager_process.start_view(known.folder, _ports(port, host, count=1), host)
    assert known.view is not None  # it has just been started
    try:
        output.info(f"Experiment {name} is served at {api_url(known.view)}, to be looked at and not changed")
        if foreground:
            manager_process.wait_for_view(known)
        else:
            output.info(f"`nnictl stop {name}` ends that; `nnictl resume {name}` goes on with the experiment")
    except KeyboardInterrupt:
        if foreground:
            manager_process.end_view(known)
        return INTERRUPTED
    return 0


def _ports(port: int | None, host: str, count: int = 2) -> Iterable[int]:
    from nni_manager.cli import preflight

    if port is None:
        return preflight.free_ports(host)
    preflight.check_ports(port, host, count)
    return [port]


def _after_start(known: KnownExperiment, foreground: bool) -> int:
    try:
        _print_banner(known, foreground)
        return _stay(known) if foreground else 0
    except KeyboardInterrupt:
        return _stop_after_interrupt(known) if foreground else INTERRUPTED
    except OSError as error:
        if foreground and output.is_hangup(error):
            return _stop_after_interrupt(known)
        raise


def _print_banner(known: KnownExperiment, foreground: bool) -> None:
    assert known.manager is not None  # it has just been started
    output.info("Successfully started Restful server!")
    output.info("Starting experiment...")
    output.info("Successfully started experiment!")
    output.plain(output.RULE)
    output.plain(f"The experiment id is {known.experiment_id}")
    output.plain(f"The API url is: {api_url(known.manager)}")
    if known.manager.certificate_sha256 is not None:
        output.plain(f"Its certificate is: {known.manager.certificate_sha256}")
    output.plain(output.RULE)
    if foreground:
        return
    output.plain()
    output.plain("You can use these commands to get more information about the experiment")
    output.plain(output.RULE)
    output.plain("         commands                       description")
    for number, (command, description) in enumerate(_COMMANDS, 1):
        output.plain(f"{number}. {command:<28} {description}")
    output.plain(output.RULE)
    output.plain("`nnictl COMMAND --help` shows the options of a command and an example")


def _stay(known: KnownExperiment) -> int:
    """Show the experiment to its end, then end its manager; the exit code."""
    from nni_manager.cli import watch
    from nni_manager.cli.manager_process import stop_experiment

    summary = watch.follow(known)
    watch.show_results(summary, known)
    if known.running_process() is not None:
        stop_experiment(known, output.info)
    problem = watch.verdict(summary)
    if problem is not None:
        raise problem
    return 0


def _stop_after_interrupt(known: KnownExperiment) -> int:
    """Ctrl-C: stop the experiment. Once more: do not wait for its trials to end, and make its manager leave at once."""
    from nni_manager.cli.manager_process import leave, stop_experiment

    name = known.experiment_id
    try:
        if known.running_process() is not None:
            output.info(f"Stopping experiment {name} (Ctrl-C once more does not wait for its trials to end)")
            stop_experiment(known, output.info)
        output.info(f"Stop experiment success. `nnictl resume {name}` goes on with it.")
    except KeyboardInterrupt:
        leave(known)
        state = stored_status(known.folder)["status"]
        if state in ("STOPPING", "STOPPED"):
            output.warning(
                f"experiment {name} ends without its manager: every trial was told to stop, and one that does not "
                f"is killed after its grace period; `nnictl resume {name}` takes note of how they ended, and goes on"
            )
        else:
            output.warning(
                f"experiment {name} is left as it is ({state}), and trials may still run: `nnictl resume {name}` "
                f"finds them, and `nnictl stop {name}` then stops them"
            )
    return INTERRUPTED


@cli.command(epilog=_example("nnictl stop", "nnictl stop GvTf2bVe", "nnictl stop --all"))
@click.argument("experiment_id", metavar="[ID|PREFIX*]", required=False)
@click.option("--all", "-a", "all_of_them", is_flag=True, help="Stop every running experiment.")
@click.option("--port", "-p", type=int, help="Stop the experiment that runs on this port.")
def stop(experiment_id: str | None, all_of_them: bool, port: int | None) -> int:
    """Stop experiments: running trials are cancelled, data stays. Views of experiments end as well."""
    from nni_manager.cli.manager_process import end_view, stop_experiment

    chosen = _to_stop(experiment_id, all_of_them, port)
    if not chosen:
        output.info("No experiment is running.")
    problems = []
    for known in chosen:
        try:
            if known.view is not None:
                end_view(known)
                output.info(f"Ended the view of experiment {known.experiment_id} on port {known.view.port}")
            if known.manager is not None:
                output.info(f"Stopping experiment {known.experiment_id}")
                stop_experiment(known, output.info)
                output.info("Stop experiment success.")
        except NniManagerError as error:
            problems.append(error)
            output.error(str(error))
    return 1 if problems else 0


def _to_stop(given: str | None, all_of_them: bool, port: int | None) -> list[KnownExperiment]:
    if sum((given is not None, all_of_them, port is not None)) > 1:
        raise UserMistake("cannot use more than one of ID, --all and --port; name experiments in one way")
    running = [each for each in known_experiments() if each.is_served]
    if all_of_them:
        return running
    if port is not None:
        chosen = [each for each in running if each.manager is not None and each.manager.port == port]
        if not chosen:
            viewed = [each for each in running if each.view is not None and each.view.port == port]
            chosen = [dataclasses.replace(each, manager=None) for each in viewed]
        if not chosen:
            raise UserMistake(
                f"cannot find an experiment on port {port}; `nnictl experiment list` shows those that run"
            )
        return chosen
    if given is not None and given.endswith("*"):
        chosen = [each for each in running if each.experiment_id.startswith(given[:-1])]
        if not chosen:
            raise UserMistake(
                f"cannot find a running experiment {given}; `nnictl experiment list` shows those that run"
            )
        return chosen
    # A prefix that only one running experiment has is clear, whatever ended experiments there are.
    matching = beginning_with(given, running) if given is not None else running
    known = matching[0] if len(matching) == 1 else resolve(given)
    if not known.is_served:
        name, status = known.experiment_id, stored_status(known.folder)
        if status["isOver"]:
            raise UserMistake(
                f"cannot stop experiment {name}: it is {status['status']} already; `nnictl resume {name}` would go on with it"
            )
        raise UserMistake(
            f"cannot stop experiment {name}: its manager is not running; if its trials still run, "
            f"`nnictl resume {name}` finds them and `nnictl stop {name}` then stops them"
        )
    return [known]


@cli.command(epilog=_example("nnictl top", "nnictl top GvTf2bVe --time 5"))
@_experiment
@click.option("--time", "-t", "every_s", type=click.FloatRange(0.1), default=1.0, show_default=True,
              metavar="SECONDS", help="How often to look.")  # fmt: skip
def top(experiment_id: str | None, every_s: float) -> None:
    """Watch a running experiment; Ctrl-C ends the watching, not the experiment."""
    from nni_manager.cli import watch

    known = resolve(experiment_id)
    if known.manager is None:
        name = known.experiment_id
        raise UserMistake(
            f"cannot watch experiment {name}: it does not run; `nnictl trial ls {name}` shows its trials"
        )
    watch.follow(known, every_s)


# ---- experiment


@cli.group()
def experiment() -> None:
    """Look at experiments.

    \b
    Example:
      nnictl experiment list --all
    """
    return


@experiment.command("list", epilog=_example("nnictl experiment list", "nnictl experiment list --all --json"))
@click.option("--all", "-a", "all_of_them", is_flag=True, help="Also those that do not run.")
@_json
def list_experiments(all_of_them: bool, as_json: bool) -> None:
    """List the experiments of this user."""
    lines = [known.line() for known in known_experiments() if all_of_them or known.is_served]
    if all_of_them:
        lines = sorted(lines + spoilt_lines(), key=lambda line: str(line["id"]))
    if as_json:
        output.print_json(lines)
        return
    if not lines:
        others = "" if all_of_them else "; `nnictl experiment list --all` shows those that ended"
        output.info(f"There is no {'' if all_of_them else 'running '}experiment{others}")
        return
    headings = ["id", "status", "port", "platform", "started", "ended", "name"]
    rows = [
        [
            line["id"],
            _status_word(line),
            str(line["port"] or line["viewPort"] or ""),
            line.get("platform", ""),
            output.moment(line.get("startTime")),
            output.moment(line.get("endTime")),
            line.get("experimentName", ""),
        ]
        for line in lines
    ]
    output.console().print(output.table(headings, rows))
    for line in lines:
        if "problem" in line:
            output.warning(f"experiment {line['id']}: {line['problem']}")
        elif _has_died(line):
            how = "left while its trials were ending" if line["status"] == "STOPPING" else "died"
            output.warning(
                f"the manager of experiment {line['id']} {how}; `nnictl resume {line['id']}` goes on with it"
            )


def _has_died(line: dict[str, Any]) -> bool:
    return not line["managerIsRunning"] and line["status"] not in ("DONE", "ERROR", "STOPPED", "UNREADABLE")


def _status_word(line: dict[str, Any]) -> str:
    status = str(line["status"])
    if line["viewPort"] is not None and not line["managerIsRunning"]:
        return f"VIEWED (was {status})" if _has_died(line) else f"VIEWED ({status})"
    return f"NOT RUNNING (was {status})" if _has_died(line) else status


@experiment.command(epilog=_example("nnictl experiment show", "nnictl experiment show GvTf2bVe"))
@_experiment
@_json_anyway
def show(experiment_id: str | None) -> None:
    """Print an experiment's profile as JSON: limits, search space, tuner, trial, and how each running trial is heard."""
    output.print_json(resolve(experiment_id).profile())


@experiment.command(epilog=_example("nnictl experiment status", "nnictl experiment status GvTf2bVe"))
@_experiment
@_json_anyway
def status(experiment_id: str | None) -> None:
    """Print an experiment's status as JSON, and what stopped it, if anything did."""
    known = resolve(experiment_id)
    client = known.client()
    if client is not None:
        output.print_json(client.get("/check-status"))
        return
    stored = stored_status(known.folder)
    output.print_json({"status": stored["status"], "errors": stored["errors"]})
    if not stored["isOver"]:
        name = known.experiment_id
        output.warning(
            f"the manager of experiment {name} does not run, this is its last status; `nnictl resume {name}` goes on"
        )


# ---- trial


@cli.group()
def trial() -> None:
    """Look at trials, and stop them.

    \b
    Example:
      nnictl trial ls
    """
    return


@trial.command(
    "ls", epilog=_example("nnictl trial ls", "nnictl trial ls GvTf2bVe --tail 5", "nnictl trial ls --json")
)
@_experiment
@click.option("--head", type=click.IntRange(1), metavar="N", help="Only the first N trials.")
@click.option("--tail", type=click.IntRange(1), metavar="N", help="Only the last N trials.")
@_json
def list_trials(experiment_id: str | None, head: int | None, tail: int | None, as_json: bool) -> None:
    """List the trials of an experiment, in the order they were made."""
    from nni_manager.cli import watch

    if head is not None and tail is not None:
        raise UserMistake("cannot use --head and --tail together; leave one out")
    known = resolve(experiment_id)
    trials = known.trials()
    shown = trials[:head] if head is not None else trials[-tail:] if tail is not None else trials
    if as_json:
        output.print_json(shown)
        return
    if not shown:
        output.info(f"Experiment {known.experiment_id} has no trials yet")
        return
    rows = [[str(each["sequenceId"]), each["id"], each["state"], *watch.trial_cells(each)] for each in shown]
    headings = ["no.", "trial", "state", "value", "time", "parameters"]
    output.console().print(output.table(headings, rows, right=("no.", "value", "time")))
    garbage = {} if known.problem else garbage_bytes(known.folder)
    for each in shown:
        if each["id"] in garbage:
            output.warning(
                f"trial {each['id']}: {garbage[each['id']]} bytes of its metrics were no records and do not count; "
                "see what else writes to $NNI_SYS_DIR/.nni/metrics, or was killed while it reported"
            )
        _print_warning(each)


def _print_warning(trial: dict[str, Any]) -> None:
    for line in trial["warning"].splitlines():
        output.warning(f"trial {trial['id']}: {line}")


@trial.command(epilog=_example("nnictl trial kill --trial-id aB3dE", "nnictl trial kill GvTf2bVe -T aB3dE"))
@_experiment
@click.option("--trial-id", "-T", required=True, metavar="TRIAL", help="The trial to stop.")
def kill(experiment_id: str | None, trial_id: str) -> None:
    """Stop one trial; the experiment goes on."""
    known = resolve(experiment_id)
    known.check_trial_id(trial_id)
    client = known.client()
    if client is None:
        name = known.experiment_id
        raise UserMistake(
            f"cannot stop trial {trial_id}: experiment {name} does not run; "
            f"if its trials still do, `nnictl resume {name}` finds them"
        )
    client.delete("/trial-jobs", trial_id)
    output.info(f"Stopping trial {trial_id}; `nnictl trial ls {known.experiment_id}` shows when it has ended")


@trial.command(
    epilog=_example("nnictl trial codegen --trial-id aB3dE", "nnictl trial codegen -T aB3dE > train.py")
)
@_experiment
@click.option(
    "--trial-id", "-T", required=True, metavar="TRIAL", help="The trial whose values are filled in."
)
def codegen(experiment_id: str | None, trial_id: str) -> None:
    """Print annotated code with the values of a trial in the place of its own (useAnnotation: true).

    Each file has a line with its name above it when there are several.
    """
    from nni_manager.config.annotated_code import files_with_values

    known = resolve(experiment_id)
    annotated = known.folder.annotated_code
    if not annotated.is_dir():
        raise UserMistake(
            f"cannot generate code of experiment {known.experiment_id}: it has no annotated code; its parameters are in "
            f"`nnictl trial ls {known.experiment_id}`"
        )
    files = files_with_values(annotated, known.trial(trial_id)["parameters"])
    for path, text in files.items():
        heading = f"# ---- {path}\n" if len(files) > 1 else ""
        sys.stdout.buffer.write(os.fsencode(heading) + text)


# ---- log


@cli.group()
def log() -> None:
    """Look at logs.

    \b
    Example:
      nnictl log stderr
      nnictl log trial --trial-id aB3dE
    """
    return


def _log_options(command: _Command) -> _Command:
    for option in (
        click.option("--path", "-p", "path_only", is_flag=True, help="Print where the file is, not what is in it."),
        click.option("--tail", "-T", type=click.IntRange(1), metavar="N", help="Only the last N lines."),
        click.option("--head", "-H", type=click.IntRange(1), metavar="N", help="Only the first N lines."),
        _experiment,
    ):  # fmt: skip
        command = option(command)
    return command


@log.command("stdout", epilog=_example("nnictl log stdout", "nnictl log stdout GvTf2bVe --tail 20"))
@_log_options
def log_stdout(experiment_id: str | None, head: int | None, tail: int | None, path_only: bool) -> None:
    """Print what the manager wrote to its stdout."""
    folder = resolve(experiment_id).folder
    _print_log(folder.manager_stdout, folder.manager_log, head, tail, path_only)


@log.command("stderr", epilog=_example("nnictl log stderr", "nnictl log stderr GvTf2bVe --path"))
@_log_options
def log_stderr(experiment_id: str | None, head: int | None, tail: int | None, path_only: bool) -> None:
    """Print what the manager wrote to its stderr."""
    folder = resolve(experiment_id).folder
    _print_log(folder.manager_stderr, folder.manager_log, head, tail, path_only)


def _print_log(path: Path, manager_log: Path, head: int | None, tail: int | None, path_only: bool) -> None:
    if head is not None and tail is not None:
        raise UserMistake("cannot use --head and --tail together; leave one out")
    if path_only:
        output.plain(str(path))
        return
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if not lines:
        output.warning(f"{path} is empty; what the manager decided is in {manager_log}")
    shown = lines[:head] if head is not None else lines[-tail:] if tail is not None else lines
    sys.stdout.buffer.writelines(shown)


@log.command(
    "trial",
    epilog=_example(
        "nnictl log trial --trial-id aB3dE", "nnictl log trial GvTf2bVe -T aB3dE --stream stderr"
    ),
)
@_experiment
@click.option(
    "--trial-id", "-T", metavar="TRIAL", help="Which trial; without it, where each trial's files are."
)
@click.option("--stream", type=click.Choice(["stdout", "stderr", "trial.log"]), default="stdout",
              show_default=True, help="trial.log is what the trial's keeper did.")  # fmt: skip
@click.option("--path", "-p", "path_only", is_flag=True, help="Print where the file is, not what is in it.")
def log_trial(experiment_id: str | None, trial_id: str | None, stream: str, path_only: bool) -> None:
    """Print what a trial wrote, in its newest attempt."""
    from nni_manager.cli import watch

    known = resolve(experiment_id)
    if trial_id is None:
        for each in known.trials():
            output.plain(f"trial {each['id']}: {each['logPath']}")
        return
    asked = known.trial(trial_id)
    path = _trial_log(known, trial_id, stream)
    if path is None:
        why = f" ({watch.why(asked)})" if asked["message"].strip() else ""
        raise UserMistake(
            f"cannot show {stream} of trial {trial_id}: it is {asked['state']} and has written nothing{why}; "
            f"see what the manager did in {known.folder.manager_log}"
        )
    if path_only:
        output.plain(str(path))
        return
    roots = (known.folder.collected_logs, known.folder.workspace.root)
    root = next(root for root in roots if path.is_relative_to(root))
    try:
        with open(open_inside(root, path), "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
    except NotOwnFile as error:
        raise UserMistake(
            f"cannot show {path}: the trial has put something else in its place ({error.strerror}); look at it with care"
        ) from error
    sys.stdout.flush()
    _print_warning(asked)


def _trial_log(known: KnownExperiment, trial_id: str, word: str) -> Path | None:
    """The fuller one of what was collected and what lies in the workspace, of the newest attempt that left either."""
    from nni_manager.store.store import log_path
    from trial_keeper.wire.messages import AttemptKey, Stream

    stream = {"stdout": Stream.STDOUT, "stderr": Stream.STDERR, "trial.log": Stream.KEEPER}[word]
    workspace, collected = known.folder.workspace, known.folder.collected_logs
    keys: list[AttemptKey] = workspace.attempts_of(trial_id)
    for attempt in (collected / trial_id).glob("[0-9]*"):
        keys += [AttemptKey(trial_id, int(attempt.name), task.name) for task in attempt.iterdir()]
    for key in sorted(set(keys), key=lambda key: (-key.attempt, key.task)):
        there = [log_path(collected, key, stream), workspace.attempt(key).stream(stream)]
        files = [path for path in there if path.is_file() or path.is_symlink()]
        if files:
            return max(files, key=lambda path: path.lstat().st_size)
    return None


changes.register(cli)
