"""nnictl webui: where a browser, or a program, finds an experiment."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import click

from nni_manager.cli.options import example, experiment_argument
from nni_manager.client import output
from nni_manager.client.experiments import resolve
from nni_manager.client.manager_client import api_url
from nni_manager.errors import UserMistake
from nni_manager.store.folders import ManagerProcess

_EVERYWHERE = ("0.0.0.0", "::")


@click.group()
def webui() -> None:
    """Find an experiment with a browser or a program.

    \b
    Example:
      nnictl webui url
    """
    return


@webui.command(epilog=example("nnictl webui url", "nnictl webui url GvTf2bVe --json"))
@experiment_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def url(experiment_id: str | None, as_json: bool) -> None:
    """Print the address of an experiment, one for each of this machine's where it listens everywhere.

    The token, which every request needs, is in no address: browsers and proxies write those down.
    """
    known = resolve(experiment_id)
    server = known.manager or known.view
    if server is None:
        name = known.experiment_id
        raise UserMistake(
            f"cannot tell where experiment {name} is served: it does not run; `nnictl view {name}` serves what is stored of it"
        )
    urls = list(dict.fromkeys(urls_of(server)))
    token_file = known.folder.token_file(is_view=known.manager is None)
    if as_json:
        output.print_json(
            {"urls": urls, "certificateSha256": server.certificate_sha256, "tokenFile": str(token_file)}
        )
        return
    for each in urls:
        output.plain(each)
    output.warning(
        "this version has no web page yet: its HTTP API is below /api/v1/nni of that address, and wants the token that "
        f"only you can read, in {token_file}"
    )


def urls_of(server: ManagerProcess) -> Iterator[str]:
    """The addresses at which a manager's HTTP API answers, without the token."""
    hosts = list(_addresses_here(server.host)) if server.host in _EVERYWHERE else [server.host]
    for host in hosts:
        parts = urlsplit(api_url(dataclasses.replace(server, host=host)))
        yield f"{parts.scheme}://{parts.netloc}"


def _addresses_here(everywhere: str) -> Iterator[str]:
    import psutil

    families = (socket.AF_INET,) if everywhere == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)
    for name in sorted(interfaces := psutil.net_if_addrs()):
        for address in interfaces[name]:
            # A link-local address of IPv6 means nothing without its interface.
            if address.family in families and "%" not in address.address:
                yield address.address
