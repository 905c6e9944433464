"""nnictl: the command tree, and how errors are reported."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from nni_manager.startup import deferred_gc

# isort: split

import click

from nni_manager.cli import (
    INTERRUPTED,
    algorithm_commands,
    archive_commands,  # noqa: F401 - adds commands to the group `experiment`
    changes,
    completion,
    config_commands,
    experiment_commands,
    help_command,
    lifecycle_commands,
    log_commands,
    openpai,
    openpai_jobs,  # noqa: F401 - adds commands to the group `openpai`
    platform_commands,
    remark_commands,  # noqa: F401 - adds commands to the groups `trial` and `experiment`
    tensorboard,
    trial_commands,
    web,
    webui,
)
from nni_manager.cli.banner import print_first_steps
from nni_manager.cli.nni_spellings import elsewhere, translated
from nni_manager.client import output
from nni_manager.errors import NniManagerError
from trial_keeper import __version__


def main() -> None:
    """Entry point of the console script."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # keep nohup's setting
            signal.signal(number, _interrupt)
    _make_streams_lenient()
    code = run(sys.argv[1:])
    # An interrupt while Python exits would print a traceback, and the command is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _make_streams_lenient() -> None:
    # A closed stream, or one whose encoding lacks a character, must not raise a traceback.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        elif stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run(arguments: Sequence[str]) -> int:
    """Run a command line, and return its exit code. Each user error is one line on stderr."""
    words = arguments
    try:
        words = translated(cli, arguments)
        code = cli.main(words, prog_name="nnictl", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 1
    except click.UsageError as error:
        output.error(usage_line(error, words))
        return 1
    except NniManagerError as error:
        # An invalid file has one line for each error.
        for line in str(error).splitlines() if hasattr(error, "diagnostics") else [str(error)]:
            output.error(line)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except OSError as error:
        if output.is_hangup(error):
            # The reader closed the pipe (`nnictl trial ls | head -1`). Redirect stdout, so that the flush at exit does not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        output.error(
            f"cannot use {error.filename or 'a file or stdout'}: {error.strerror or error}; fix that and try again"
        )
        return 1
    return code if isinstance(code, int) else 0


def usage_line(error: click.UsageError, words: Sequence[str]) -> str:
    """A usage error of a command line as one sentence, from "cannot" to the remedy."""
    path = error.ctx.command_path if error.ctx is not None else _command_of(words)
    near: Sequence[str] = ()
    match error:
        case click.exceptions.NoSuchCommand():
            what = f"cannot find the command {path} {error.command_name}"
            meant = elsewhere(cli, path.removeprefix("nnictl").strip(), error.command_name)
            near = [f"`nnictl {each}`" for each in meant] or error.possibilities or ()
        case click.exceptions.NoSuchOption():
            what, near = f"cannot use option {error.option_name} of {path}", error.possibilities or ()
        case click.exceptions.MissingParameter() if error.param is not None:
            hint = error.param.get_error_hint(error.ctx) if error.ctx is not None else error.param.name
            what = f"cannot run without {str(hint).replace(chr(39), '')}"
            # A trial where the command takes an experiment.
            given = error.ctx.params.get("experiment_id") if error.ctx is not None else None
            if error.param.name == "trial_id" and isinstance(given, str):
                near = [f"`{path} -T {given}`"]
        case _:
            message = error.format_message().rstrip(".")
            _, found, own = message.partition(": cannot ")
            what = f"cannot {own}" if found else f"cannot read this command line: {message}"
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{what}; {hint}`{path} --help` shows the usage"


def _command_of(words: Sequence[str]) -> str:
    """The command of a command line. click does not name it if an option has no value."""
    path, command = "nnictl", cli
    for word in words:
        found = command.commands.get(word)
        if found is None:
            break
        path = f"{path} {word}"
        if not isinstance(found, click.Group):
            break
        command = found
    return path


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 110},
)
@click.version_option(__version__, "--version", "-v", message="nnictl %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Run hyper-parameter experiments.

    An ID may be abbreviated to a prefix. Without one, commands use the experiment that runs, else the latest. The exit code is 0
    on success, 1 on an error (reported on stderr), and 130 after Ctrl-C.

    \b
    Example:
      nnictl create config.yml --foreground
    """
    if context.invoked_subcommand is None:
        print_first_steps()


for _command in (
    *lifecycle_commands.COMMANDS,
    experiment_commands.experiment,
    trial_commands.trial,
    log_commands.log,
    config_commands.config,
    platform_commands.platform,
    platform_commands.trainingservice,
    algorithm_commands.algo,
    web.web,
    webui.webui,
    tensorboard.tensorboard,
    completion.completion,
    openpai.openpai,
    changes.update,
    help_command.help_command,
):
    cli.add_command(_command)
deferred_gc.start()
