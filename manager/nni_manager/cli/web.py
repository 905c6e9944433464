"""nnictl web: one page for all experiments."""

from __future__ import annotations

import click

from nni_manager.cli import options
from nni_manager.client import output
from nni_manager.errors import UserError
from nni_manager.support.web_server_options import WebServerOptions


@click.command(epilog=options.example("nnictl web", "nnictl web --port 8070", "nnictl web --stop"))
@click.option("--stop", "is_stopped", is_flag=True, help="End the server. Experiments continue.")
@click.option(
    "--foreground",
    "-f",
    is_flag=True,
    help="Serve until Ctrl-C or SIGTERM, for a service manager; print no link.",
)
@options.json_option
@options.hub_options
@options.port_option(None, "Port of the page.  [default: the first free one from 8070 on]")
def web(is_stopped: bool, foreground: bool, as_json: bool, port: int | None, web: WebServerOptions) -> int:
    """Serve one page for all experiments: a list, a comparison, and each experiment's page.

    It runs in the background until `nnictl web --stop`. If it runs already, only a new login link is printed.
    """
    from nni_manager.client import manager_process, preflight
    from nni_manager.client.experiments import KnownExperiment
    from nni_manager.client.hub_folder import hub_folder, make_folder
    from nni_manager.client.links import links_to
    from nni_manager.client.manager_stop import end_view

    folder = hub_folder()
    running = folder.running_view()
    if is_stopped:
        if running is None:
            output.info("The page of all experiments is not served; nothing to do")
            return 0
        end_view(KnownExperiment(folder, None, view=running))
        output.info(f"Ended the page of all experiments on port {running.port}; experiments continue")
        return 0
    options.exclude({"--foreground": foreground, "--json": as_json})
    if foreground and running is not None:
        raise UserError(
            f"cannot serve the page of all experiments: process {running.pid} serves it on port {running.port}; "
            "run `nnictl web --stop` first"
        )
    if running is None:
        try:
            make_folder(folder)
        except OSError as error:
            raise UserError(
                f"cannot create {folder.path}: {error.strerror}; give this user write permission there, or set XDG_STATE_HOME"
            ) from error
        ports = preflight.usable_ports(port, web.host, 1, first=preflight.HUB_PORT)
        if foreground:
            output.info("Serving the page of all experiments; `nnictl web` prints a login link")
            manager_process.become_hub(folder, ports, web)
        running = manager_process.start_hub(folder, ports, web)
    elif port not in (None, running.port):
        raise UserError(
            f"cannot serve the page of all experiments on port {port}: it is served on port {running.port}; "
            "run `nnictl web --stop` first"
        )
    found = links_to(folder.experiment_id, running)
    if as_json:
        output.print_json(found)
        return 0
    output.plain("The page of all experiments:")
    for link in found["links"]:
        output.plain(f"  {link}")
    output.plain(
        f"Each logs in one browser, within {found['expiresInS'] // 60} minutes; `nnictl web` prints another, and "
        "`nnictl web --stop` ends it."
    )
    return 0
