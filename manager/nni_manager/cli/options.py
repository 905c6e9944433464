"""Options and arguments that several commands share, the format of their examples, and the exit code after Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nni_manager.client import output
from nni_manager.errors import NniManagerError, UserError
from nni_manager.support.log_format import FORMATS
from nni_manager.support.web_server_options import WebServerOptions

if TYPE_CHECKING:
    from nni_manager.client.experiments import KnownExperiment, Managers
    from nni_manager.support.server_tls import TlsFiles

Command = Callable[..., Any]


class _Count(click.IntRange):
    """A number of entries. No list has more than `sys.maxsize`, and slices take no larger number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        return min(super().convert(value, param, ctx), sys.maxsize)


COUNT = _Count(1)
FILE = click.Path(path_type=Path)
"""The exit code after Ctrl-C: 128 + SIGINT, as in shells. docs/nnictl.md describes it for users."""
# A longer list of completions is hard to read.
_MAX_COMPLETIONS = 200


class Port(click.ParamType[Any]):
    """A port number, or `auto` as None."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """The port number; None for `auto`."""
        from nni_manager.client.preflight import HIGHEST_PORT

        if value == "auto":
            return None
        if not str(value).isdecimal() or not 1 <= int(value) <= HIGHEST_PORT:
            self.fail(f"cannot use --port {value}: it is neither a number from 1 to {HIGHEST_PORT} nor auto")
        return int(value)


_host_option = click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
                           help="Listen address of the HTTP API. HTTPS is used unless ADDRESS is loopback.")  # fmt: skip

_require_token_option = click.option(
    "--require-token", is_flag=True,
    help="Require the token of your own programs on this machine, too, such as curl and NNI's client.",
)  # fmt: skip


class UrlPrefix(click.ParamType[Any]):
    """A path prefix, as `preflight.url_prefix` reads it."""

    name = "PREFIX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The prefix."""
        from nni_manager.client.preflight import url_prefix

        try:
            return url_prefix(str(value))
        except UserError as error:
            self.fail(str(error))


_url_prefix_option = click.option(
    "--url-prefix", "-u", type=UrlPrefix(), default="", metavar="PREFIX",
    help="Serve the page and the HTTP API below this path, for a proxy. The token is then required of all programs.",
)  # fmt: skip


def web_server_options(command: Command) -> Command:
    """Options of commands that start a web server, as the parameter `web`."""

    def with_web(host: str, url_prefix: str, require_token: bool, **given: Any) -> Any:
        web = WebServerOptions(host, url_prefix, require_token, _tls_of(given))
        return command(web=web, **given)

    return _added(_SERVER_OPTIONS, functools.update_wrapper(with_web, command))


def hub_options(command: Command) -> Command:
    """Those of the page of all experiments, which always requires the token."""

    def with_web(host: str, url_prefix: str, **given: Any) -> Any:
        web = WebServerOptions(host, url_prefix, tls=_tls_of(given))
        return command(web=web, **given)

    return _added(_SERVER_OPTIONS[1:], functools.update_wrapper(with_web, command))


def _added(added: Iterable[Callable[[Command], Command]], command: Command) -> Command:
    for option in added:
        command = option(command)
    return command


def has_url_prefix() -> bool:
    """True if the command line has --url-prefix."""
    source = click.get_current_context().get_parameter_source("url_prefix")
    return source is not click.core.ParameterSource.DEFAULT


def _tls_of(given: dict[str, Any]) -> TlsFiles | None:
    """The files of the options, which are removed from `given`."""
    from nni_manager.client.preflight import tls_files

    return tls_files(given.pop("tls_certificate"), given.pop("tls_key"))


# The last one is the first in the help.
_SERVER_OPTIONS = (
    _require_token_option,
    click.option("--tls-key", type=FILE, metavar="FILE", help="PEM file with the key of that certificate."),
    click.option(
        "--tls-certificate", type=FILE, metavar="FILE",
        help="Use HTTPS with this certificate, a PEM file. A renewed file is used without a restart.",
    ),
    _url_prefix_option,
    _host_option,
)  # fmt: skip


def port_option(default: str | None, help_text: str | None = None) -> Callable[[Command], Command]:
    """The option --port; None for `auto`, and without the option if `default` is None."""
    return click.option(
        "--port", "-p", type=Port(), default=default, show_default=True, metavar="N|auto", help=help_text
    )


def start_options(command: Command) -> Command:
    """Options of commands that start a manager.

    `web`, `port` (None: any), `debug`, `log_format` and `foreground`.
    """
    for option in (
        click.option("--foreground", "-f", is_flag=True, help="Show progress, wait for the end, then stop."),
        click.option("--debug", "-d", is_flag=True, help="Log more, and check no versions."),
        click.option(
            "--log-format",
            type=click.Choice(FORMATS),
            default="text",
            show_default=True,
            help="Of the manager's log; json: an object per line.",
        ),
        web_server_options,
        port_option(
            None,
            "Port of the HTTP API; keepers use the next one.  [default: the first free pair from 8080 on]",
        ),
    ):
        command = option(command)
    return command


def complete_experiment(_: click.Context, __: click.Parameter, prefix: str) -> list[str]:
    """The ids of this user's experiments that start with the given text, for shell completion."""
    from nni_manager.store.registry import Registry

    ids = [folder.experiment_id for folder in Registry.of_user().all() if folder.path.is_dir()]
    return [each for each in ids if each.startswith(prefix)]


def complete_trial(context: click.Context, _: click.Parameter, prefix: str) -> list[str]:
    """The matching trial ids of the experiment that the command line names, for shell completion; on an error, none."""
    from nni_manager.client.experiments import resolve

    # While an option lacks its value, click leaves earlier arguments in `args` and not in `params`.
    given = context.params.get("experiment_id") or next(iter(context.args), None)
    with contextlib.suppress(NniManagerError):
        return resolve(given).stored.read(lambda reader: reader.trial_ids(prefix, _MAX_COMPLETIONS))
    return []


experiment_argument = click.argument(
    "experiment_id", metavar="[ID]", required=False, shell_complete=complete_experiment
)
named_experiment_argument = click.argument("experiment_id", metavar="ID", shell_complete=complete_experiment)
experiment_dir_option = click.option(
    "--experiment-dir", "--experiment_dir", "-e", "experiment_dir", metavar="DIR", type=FILE,
    help="The experiment's folder, for an experiment that `nnictl experiment list` lacks.",
)  # fmt: skip
json_anyway = click.option(
    "--json", is_flag=True, expose_value=False, help="No effect: the output is always JSON."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


yes_option = click.option("--yes", "-y", "is_agreed", is_flag=True, help="Do not ask for confirmation.")


def experiment(given: str | None) -> KnownExperiment:
    """The experiment with this id or id prefix; None: the one that runs, else the latest, which is named on stderr.

    Raises:
        UserError: see `resolve`.
    """
    from nni_manager.client.experiments import resolve

    known = resolve(given)
    if given is None and known.manager is None:
        output.note(f"no experiment is running; this is the latest, {known.experiment_id}")
    return known


def exclude(*exclusive: Mapping[str, object]) -> None:
    """Refuse options that exclude each other: of each mapping from options to values, at most one may have a value.

    Raises:
        UserError: two of them are given.
    """
    for options in exclusive:
        given = [name for name, value in options.items() if value]
        if len(given) > 1:
            raise UserError(f"cannot use {given[0]} and {given[1]} together; leave one out")


def warn_of_dead_manager(known: KnownExperiment) -> bool:
    """Warn on stderr if the manager of an experiment that is not over does not run; True if so."""
    if known.manager is not None or known.stored.status()["isTerminal"]:
        return False
    name = known.experiment_id
    if known.manager_is_starting():
        output.note(f"the manager of experiment {name} is starting")
        return False
    output.warning(
        f"the manager of experiment {name} is not running, and this is its last status; `nnictl resume {name}` resumes it"
    )
    return True


def warn_of_dead_managers(unserved: Iterable[KnownExperiment], managers: Managers) -> None:
    """Name the experiments whose manager has died: they are not running, and have not ended."""
    dead: dict[bool, list[str]] = {True: [], False: []}
    for known in unserved:
        # An unreadable store is shown by --all.
        with contextlib.suppress(NniManagerError):
            if known.problem or known.stored.status()["isTerminal"]:
                continue
            if known.manager_is_starting(managers):
                output.note(f"the manager of experiment {known.experiment_id} is starting")
            else:
                dead[_may_run(known)].append(known.experiment_id)
    for may_run, names in dead.items():
        if names:
            whose, name = ("manager", names[0]) if len(names) == 1 else ("managers", "ID")
            left = (
                "trials may still run"
                if may_run
                else "none of its trials runs"
                if len(names) == 1
                else "no trial runs"
            )
            stop = f", `nnictl stop {name}` ends its trials" if may_run else ""
            output.warning(
                f"the {whose} of {', '.join(names)} died, and {left}; `nnictl resume {name}` resumes the experiment{stop}"
            )


def _may_run(known: KnownExperiment) -> bool:
    """True if trials of an experiment without a manager may run; those of a cluster are not looked for."""
    from nni_manager.support.leftovers import processes_of

    config = known.stored.config()
    return not config.cluster.is_this_machine or bool(processes_of(known.folder.workspace))


def warn_of_error(known: KnownExperiment) -> bool:
    """Warn on stderr if the experiment's status is ERROR, and name the error; True if so."""
    from nni_manager.domain.message_summary import outline

    status = None if known.problem else known.stored.status()
    if status is None or status["status"] != "ERROR":
        return False
    name = known.experiment_id
    causes = "; ".join(map(outline, status["errors"])) or "it failed"
    output.warning(
        f"experiment {name} has the status ERROR: {causes}; `nnictl experiment status {name}` shows the whole error"
    )
    return True


def prefers_nni_output() -> bool:
    """True if NNICTL_COMPAT=1 in the environment requests the output of NNI's own nnictl."""
    return os.environ.get("NNICTL_COMPAT") == "1"


def config_option(help_text: str) -> Callable[[Command], Command]:
    """The required path `config_path`: the option --config, or the argument of the command."""

    def added(command: Command) -> Command:
        @functools.wraps(command)
        def with_path(config_path: Path | None, config_argument: Path | None, **given: Any) -> Any:
            if config_path is not None and config_argument is not None:
                raise UserError(
                    f"cannot use both {config_argument} and --config {config_path}; name one experiment file"
                )
            path = config_path or config_argument
            if path is None:
                name = click.get_current_context().command_path
                raise UserError(f"cannot run {name} without an experiment file; write `{name} FILE`")
            return command(config_path=path, **given)

        with_argument = click.argument("config_argument", metavar="[FILE]", required=False, type=FILE)(
            with_path
        )
        return click.option("--config", "-c", "config_path", metavar="FILE", type=FILE, help=help_text)(
            with_argument
        )

    return added


def trial_option(help_text: str, *, required: bool = True) -> Callable[[Command], Command]:
    """The option --trial-id, which also accepts a prefix of an id."""
    return click.option(
        "--trial-id", "-T", required=required, metavar="TRIAL", help=help_text, shell_complete=complete_trial
    )


def group(name: str, help_text: str, *examples: str) -> click.Group:
    """A command group whose help ends with examples."""
    return click.Group(name, help=f"{help_text}\n\n{example(*examples)}")


def example(*lines: str) -> str:
    """The examples below the options in a command's help."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def confirm(question: str) -> bool:
    """Ask on the terminal; True if the user agrees.

    Raises:
        UserError: there is no terminal.
    """
    if not sys.stdin.isatty():
        raise UserError(f"cannot ask {question!r}: there is no terminal; confirm with --yes")
    return click.confirm(question)
