"""nnictl webui: where a browser, or a program, finds an experiment."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import click

from nni_manager.cli.options import example, experiment_argument
from nni_manager.client import output
from nni_manager.client.experiments import resolve
from nni_manager.client.manager_client import ManagerClient, ManagerSilent, RequestRefused
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
    """Print a link that opens the web page of an experiment; where it listens everywhere, one for each address of this machine.

    The first browser that comes by one of them, within ten minutes, is let in, and for a week. The token, which programs need,
    is in no address: browsers and proxies write those down.
    """
    known = resolve(experiment_id)
    server = known.manager or known.view
    if server is None:
        name = known.experiment_id
        raise UserMistake(
            f"cannot tell where experiment {name} is served: it does not run; `nnictl view {name}` serves what is stored of it"
        )
    found = links_to(known.experiment_id, server)
    if as_json:
        token_file = known.folder.token_file(is_view=known.manager is None)
        output.print_json(
            {
                "urls": found.origins,
                "links": found.links,
                "expiresInS": found.expires_in_s,
                "certificateSha256": server.certificate_sha256,
                "tokenFile": str(token_file),
            }
        )
        return
    for each in found.links:
        output.plain(each)


@dataclass(frozen=True, slots=True)
class Links:
    """What lets one browser in, by each address at which the manager answers. The code is behind the #, which no server sees."""

    origins: list[str]
    links: list[str]
    expires_in_s: int


def links_to(experiment_id: str, server: ManagerProcess) -> Links:
    """New ones, from whoever serves the experiment.

    Raises:
        ManagerSilent: nobody answers, or another program does.
    """
    made = ManagerClient(experiment_id, server).post("/entrance")
    origins = list(dict.fromkeys(urls_of(server)))
    return Links(origins, [f"{origin}/enter#{made['code']}" for origin in origins], made["expiresInS"])


def print_links(experiment_id: str, server: ManagerProcess) -> None:
    """Tell whoever has begun to serve an experiment where its page is; that it cannot be told is no reason to fail."""
    try:
        found = links_to(experiment_id, server)
    except (ManagerSilent, RequestRefused) as error:
        output.warning(str(error))
        return
    output.plain(f"The Web UI urls are: {'   '.join(found.links)}")
    output.plain(
        f"The first browser that comes by one of them within {found.expires_in_s // 60} minutes is let in; "
        f"`nnictl webui url {experiment_id}` prints more"
    )


def urls_of(server: ManagerProcess) -> Iterator[str]:
    """The addresses at which a manager answers, without any secret."""
    hosts = list(_addresses_here(server.host)) if server.host in _EVERYWHERE else [server.host]
    for host in hosts:
        yield dataclasses.replace(server, host=host).origin


def _addresses_here(everywhere: str) -> Iterator[str]:
    import psutil

    families = (socket.AF_INET,) if everywhere == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)
    for name in sorted(interfaces := psutil.net_if_addrs()):
        for address in interfaces[name]:
            # A link-local address of IPv6 means nothing without its interface.
            if address.family in families and "%" not in address.address:
                yield address.address
