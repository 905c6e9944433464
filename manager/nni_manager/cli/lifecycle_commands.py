"""nnictl create, resume, view, stop and top: the life cycle of an experiment's manager."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from pathlib import Path

import click

from nni_manager.cli import INTERRUPTED, options
from nni_manager.cli.banner import print_next_steps
from nni_manager.client import output
from nni_manager.client.experiments import (
    KnownExperiment,
    known_experiments,
    managers_once,
    match_prefix,
    register,
    resolve,
)
from nni_manager.client.interrupts import deferred_interrupts
from nni_manager.client.links import print_links
from nni_manager.client.manager_client import api_url
from nni_manager.errors import NniManagerError, UserError
from nni_manager.store.folders import ManagerProcess
from nni_manager.support.web_server_options import WebServerOptions


@click.command(
    epilog=options.example("nnictl create config.yml", "nnictl create --config config.yml -p auto -f")
)
@options.config_option("The experiment file; `create FILE` is the same.")
@options.start_options
def create(
    config_path: Path,
    port: int | None,
    web: WebServerOptions,
    debug: bool,
    log_format: str,
    foreground: bool,
) -> int:
    """Start a new experiment."""
    from nni_manager.client import manager_process, preflight
    from nni_manager.client.warm_start import print_points, with_warm_start
    from nni_manager.config.pruned_trials import lesson_of_early_stops
    from nni_manager.config.reader import read_experiment_file
    from nni_manager.training_services.platform import platform_of

    config = with_warm_start(read_experiment_file(config_path))
    platform = platform_of(config)
    place = platform.check()
    ports = preflight.usable_ports(port, web.host)
    for expansion in config.expansions:
        output.info(f"expand {expansion.key}: {expansion.written} to {expansion.absolute}")
    for warning in (*config.warnings, *place.warnings):
        output.warning(warning)
    if lesson := lesson_of_early_stops(config):
        output.info(lesson)
    print_points(config)
    if place.where:
        output.info(f"run jobs on {place.where}")
    if not config.cluster.is_this_machine:
        from nni_manager.engine.code_snapshot import size_of

        storage = platform.storage_here() or config.log_dir  # the parent folder of the workspace
        size = size_of(config.code_dir, storage, config.secret_files)
        output.info(f"pack codeDir {config.code_dir} for the containers: {size}")
    if config.is_annotated:
        output.info(
            f"copy codeDir {config.code_dir} for the trials, with chosen values in place of annotations"
        )
    output.info("Starting restful server...")
    try:
        known = manager_process.create_experiment(
            config,
            ports,
            debug,
            web,
            log_format=log_format,
        )
    except KeyboardInterrupt:
        output.info("Interrupted: no experiment was created, and nothing of it runs")
        raise
    return _after_start(known, foreground, port)


@click.command(epilog=options.example("nnictl resume GvTf2bVe", "nnictl resume GvTf2bVe --foreground"))
@options.experiment_argument
@options.experiment_dir_option
@options.start_options
def resume(
    experiment_id: str | None,
    experiment_dir: Path | None,
    port: int | None,
    web: WebServerOptions,
    debug: bool,
    log_format: str,
    foreground: bool,
) -> int:
    """Resume an experiment whose manager is not running.

    Without --url-prefix, it has the prefix of its last manager.
    """
    from nni_manager.client import manager_process, manager_stop, preflight

    known = _resolved(experiment_id, experiment_dir)
    name = known.experiment_id
    if known.manager_is_frozen():
        output.info(
            f"The manager of experiment {name} is frozen ({known.folder.lease_holder()}): a new manager takes over"
        )
    elif known.manager is not None:
        raise UserError(
            f"cannot resume experiment {name}: it runs on port {known.manager.port}; "
            f"watch it with `nnictl top {name}`, or stop it first with `nnictl stop {name}`"
        )
    if known.view is not None:
        # The manager serves everything that the view serves, usually on the same port.
        manager_stop.end_view(known)
        output.info(f"Ended the view of experiment {name} on port {known.view.port}")
    _warn_of_changed_space(known)
    ports = preflight.usable_ports(port, web.host)
    output.info("Starting restful server...")
    known = manager_process.start_manager(
        known.folder,
        ports,
        debug,
        _with_last_prefix(known, web),
        log_format=log_format,
    )
    return _after_start(known, foreground, port)


def _warn_of_changed_space(known: KnownExperiment) -> None:
    """Warn if the search space of the experiment file is another one now: the stored one counts.

    After `nnictl update searchspace` the two usually differ, and the user knows the command.
    """
    from nni_manager.config.reader import read_search_space_now

    name = known.experiment_id
    # The manager reports an unreadable database, and needs neither an experiment file nor its folder.
    with contextlib.suppress(NniManagerError, OSError):
        config = known.stored.config()
        if config.is_annotated or config.search_space_revision:
            return
        file, space = read_search_space_now(config.config_path)
        if space != config.search_space_raw and file.is_file():
            step, written = "run", shlex.quote(str(file))
            if file == config.config_path:
                step, written = "write the new one into a JSON file FILE, and run", "FILE"
            output.warning(
                f"the search space in {file} has changed, and experiment {name} keeps its own; to use the new one once the "
                f"experiment is resumed, {step} `nnictl update searchspace {name} --filename {written}`"
            )


@click.command(
    epilog=options.example(
        "nnictl view GvTf2bVe", "nnictl view ~/nni-experiments/GvTf2bVe --port 8090 --foreground"
    )
)
@options.experiment_argument
@options.experiment_dir_option
@click.option("--foreground", "-f", is_flag=True, help="Serve until Ctrl-C, or until the view is stopped.")
@options.web_server_options
@options.port_option(None, "Port of the HTTP API.  [default: the first free pair from 8080 on]")
def view(
    experiment_id: str | None,
    experiment_dir: Path | None,
    port: int | None,
    web: WebServerOptions,
    foreground: bool,
) -> int:
    """Serve a stored experiment read-only.

    Without --url-prefix, it has the prefix of its last manager.
    """
    from nni_manager.client import manager_process, manager_stop, preflight

    known = _resolved(experiment_id, experiment_dir)
    name, server = known.experiment_id, known.manager or known.view
    if server is not None:
        how = "runs" if known.manager else "is viewed"
        output.info(f"Experiment {name} {how} already: it is served at {api_url(server)}")
        print_links(name, server)
        return 0
    ports = preflight.usable_ports(port, web.host, 1)
    known = manager_process.start_view(known.folder, ports, _with_last_prefix(known, web))
    assert known.view is not None  # it has just been started
    try:
        _name_other_port(known.view, port)
        output.info(f"Experiment {name} is served read-only at {api_url(known.view)}")
        print_links(name, known.view)
        if foreground:
            manager_stop.wait_for_view(known)
        else:
            output.info(f"`nnictl stop {name}` ends the view; `nnictl resume {name}` resumes the experiment")
    except KeyboardInterrupt:
        if foreground:
            manager_stop.end_view(known)
        return INTERRUPTED
    return 0


def _with_last_prefix(known: KnownExperiment, web: WebServerOptions) -> WebServerOptions:
    """The options; without --url-prefix, with the prefix of the last manager."""
    last = known.folder.process()
    if options.has_url_prefix() or last is None:
        return web
    return dataclasses.replace(web, url_prefix=last.url_prefix)


def _resolved(experiment_id: str | None, experiment_dir: Path | None) -> KnownExperiment:
    if experiment_dir is None and experiment_id is not None and os.sep in experiment_id:
        experiment_dir, experiment_id = Path(experiment_id), None
    if experiment_dir is not None:
        experiment_id = register(experiment_dir, experiment_id)
    return options.experiment(experiment_id)


def _name_other_port(server: ManagerProcess, given: int | None) -> None:
    """Say that the default port was taken. `given`: the port of the option --port; None: without the option."""
    from nni_manager.client.preflight import DEFAULT_PORT

    if given is None and server.port != DEFAULT_PORT:
        output.info(f"Port {DEFAULT_PORT} is taken; this experiment uses port {server.port}")


def _after_start(known: KnownExperiment, foreground: bool, port: int | None) -> int:
    try:
        assert known.manager is not None  # it has just been started
        _name_other_port(known.manager, port)
        _print_banner(known, foreground)
        return _follow_to_end(known) if foreground else 0
    except KeyboardInterrupt:
        if foreground:
            return _stop_after_interrupt(known)
        name = known.experiment_id
        output.info(
            f"Experiment {name} runs; `nnictl top {name}` shows it, and `nnictl stop {name}` stops it"
        )
        return INTERRUPTED
    except OSError as error:
        if foreground and output.is_hangup(error):
            return _stop_after_interrupt(known)
        raise


def _print_banner(known: KnownExperiment, foreground: bool) -> None:
    assert known.manager is not None  # it has just been started
    output.info("Successfully started experiment!")
    output.plain(f"The experiment id is {known.experiment_id}")
    output.plain(f"The API url is: {api_url(known.manager)}")
    if known.manager.certificate_sha256 is not None:
        output.plain(f"Its certificate is: {known.manager.certificate_sha256}")
    print_links(known.experiment_id, known.manager)
    output.plain()
    if not foreground:
        print_next_steps(known.experiment_id)


def _follow_to_end(known: KnownExperiment) -> int:
    """Show the experiment until its end, then stop its manager; return the exit code."""
    from nni_manager.client import watch
    from nni_manager.client.manager_stop import stop_experiment

    summary = watch.follow(known)
    watch.show_results(summary, known)
    if known.running_process() is not None:
        stop_experiment(known)
    problem = watch.verdict(summary)
    if problem is not None:
        raise problem
    return 0


def _stop_after_interrupt(known: KnownExperiment) -> int:
    """Stop the experiment after Ctrl-C. A second Ctrl-C terminates its manager at once, without waiting for its trials."""
    name = known.experiment_id
    try:
        from nni_manager.client.manager_stop import stop_experiment

        if known.running_process() is not None:
            output.info(
                f"Stopping experiment {name} (press Ctrl-C again to end without waiting for its trials)"
            )
            stop_experiment(known)
        output.info(f"Stop experiment success. `nnictl resume {name}` resumes it.")
    except KeyboardInterrupt:
        with deferred_interrupts():
            _leave(known)
    return INTERRUPTED


def _leave(known: KnownExperiment) -> None:
    from nni_manager.client.manager_stop import leave

    leave(known)
    name, state = known.experiment_id, known.stored.status()["status"]
    if state in ("STOPPING", "STOPPED"):
        output.warning(
            f"experiment {name} ends without its manager: every trial was asked to stop, and is killed if it still runs "
            f"after its grace period; `nnictl resume {name}` records how they ended, and resumes the experiment"
        )
    else:
        output.warning(
            f"experiment {name} keeps its state ({state}), and its trials may still run: `nnictl resume {name}` "
            f"finds them, and `nnictl stop {name}` ends them"
        )


@click.command(epilog=options.example("nnictl stop", "nnictl stop GvTf2bVe", "nnictl stop --all"))
@click.argument(
    "experiment_id", metavar="[ID|PREFIX*]", required=False, shell_complete=options.complete_experiment
)
@click.option("--all", "-a", "all_of_them", is_flag=True, help="Stop every running experiment.")
@click.option("--port", "-p", type=int, help="Stop the experiment that runs on this port.")
def stop(experiment_id: str | None, all_of_them: bool, port: int | None) -> int:
    """Stop experiments.

    Running trials are cancelled; data is kept. Views of the experiments end as well.
    """
    from nni_manager.client import tensorboards
    from nni_manager.client.manager_stop import end_view, stop_experiment, when_started
    from nni_manager.client.remains import end_without_manager

    chosen = _to_stop(experiment_id, all_of_them, port)
    if not chosen:
        output.info("No experiment is running.")
    problems = []
    for known in map(when_started, chosen):
        try:
            if known.view is not None:
                end_view(known)
                output.info(f"Ended the view of experiment {known.experiment_id} on port {known.view.port}")
            if known.manager is not None:
                output.info(f"Stopping experiment {known.experiment_id}")
                stop_experiment(known)
                output.info("Stop experiment success.")
            if not known.is_served:
                output.info(f"Stopping experiment {known.experiment_id}")
                output.info(end_without_manager(known))
                output.info("Stop experiment success.")
            for each in tensorboards.started(known.folder):
                if each.process.is_alive:
                    remedy = f"`nnictl tensorboard stop {known.experiment_id}` ends it"
                    output.info(f"Its TensorBoard on port {each.port} still runs; {remedy}")
        except NniManagerError as error:
            problems.append(error)
            output.error(str(error))
    return 1 if problems else 0


def _to_stop(given: str | None, all_of_them: bool, port: int | None) -> list[KnownExperiment]:
    if sum((given is not None, all_of_them, port is not None)) > 1:
        raise UserError("cannot use more than one of ID, --all and --port; use one of them")
    managers = managers_once()
    running = [each for each in known_experiments() if each.is_served or each.manager_is_starting(managers)]
    if all_of_them:
        return running
    if port is not None:
        viewed = [each for each in running if each.view is not None and each.view.port == port]
        chosen = [each for each in running if each.manager is not None and each.manager.port == port]
        chosen = chosen or [dataclasses.replace(each, manager=None) for each in viewed]
        what = f"an experiment on port {port}"
    elif given is not None and given.endswith("*"):
        chosen = [each for each in running if each.experiment_id.startswith(given[:-1])]
        what = f"a running experiment {given}"
    else:
        return [_one_to_stop(given, running)]
    if not chosen:
        raise UserError(f"cannot find {what}; `nnictl experiment list` lists the running ones")
    return chosen


def _one_to_stop(given: str | None, running: list[KnownExperiment]) -> KnownExperiment:
    # A prefix of exactly one running experiment is unique, whatever stopped experiments match.
    matching = match_prefix(given, running) if given is not None else running
    if len(matching) != 1 and given is not None:
        matching = match_prefix(given, known_experiments())
    known = matching[0] if len(matching) == 1 else resolve(given)
    if known.is_served or known.manager_is_starting():
        return known
    from nni_manager.client.remains import has_ended, is_unusable

    if is_unusable(known):
        return known
    if has_ended(known):
        name, status = known.experiment_id, known.stored.status()
        raise UserError(
            f"cannot stop experiment {name}: it is {status['status']} already; `nnictl resume {name}` would resume it"
        )
    return known


@click.command(epilog=options.example("nnictl top", "nnictl top GvTf2bVe --time 5"))
@options.experiment_argument
@click.option("--time", "-t", "every_s", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True,
              metavar="SECONDS", help="Interval between updates.")  # fmt: skip
def top(experiment_id: str | None, every_s: float) -> None:
    """Watch a running experiment.

    Shows the progress, the best trial so far and the remaining time. Ctrl-C ends this command, not the experiment.
    """
    from nni_manager.client import watch

    known = options.experiment(experiment_id)
    if known.manager is None:
        name = known.experiment_id
        has_ended = not known.problem and known.stored.status()["isTerminal"]
        remedy = "" if has_ended else f", `nnictl resume {name}` resumes it"
        raise UserError(
            f"cannot watch experiment {name}: it is not running; `nnictl trial ls {name}` shows its trials{remedy}"
        )
    summary = watch.follow(known, every_s)
    if summary["status"] == "ERROR":
        output.warning(str(watch.verdict(summary)))


COMMANDS = (create, resume, view, stop, top)
