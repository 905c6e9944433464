"""nnictl web: one page for all experiments."""

from __future__ import annotations

import click

from nni_manager.cli import options
from nni_manager.client import output
from nni_manager.errors import UserError


@click.command(epilog=options.example("nnictl web", "nnictl web --port 8070", "nnictl web --stop"))
@click.option("--stop", "is_stopped", is_flag=True, help="End the server. Experiments continue.")
@options.json_option
@options.url_prefix_option
@options.host_option
@options.port_option(None, "Port of the page.  [default: the first free one from 8070 on]")
def web(is_stopped: bool, as_json: bool, host: str, port: int | None, url_prefix: str | None) -> int:
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
    if running is None:
        try:
            make_folder(folder)
        except OSError as error:
            raise UserError(
                f"cannot create {folder.path}: {error.strerror}; give this user write permission there, or set XDG_STATE_HOME"
            ) from error
        ports = preflight.usable_ports(port, host, 1, first=preflight.HUB_PORT)
        running = manager_process.start_hub(folder, ports, host, url_prefix=url_prefix or "")
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
