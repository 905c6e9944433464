"""Login links to the web page of an experiment."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from typing import Any

from nni_manager.client import output
from nni_manager.client.manager_client import ManagerClient, ManagerRefusal, ManagerUnresponsive
from nni_manager.store.folders import ManagerProcess

_EVERYWHERE = ("0.0.0.0", "::")


def links_to(experiment_id: str, server: ManagerProcess) -> dict[str, Any]:
    """Request new login links for one browser from the manager or view that serves the experiment.

    The result has `urls`, one per address of the manager, the `links` to these, and `expiresInS`. The login code follows the #
    of a link, so no server receives it.

    Raises:
        ManagerUnresponsive: no answer, or another program answers.
    """
    made = ManagerClient(experiment_id, server).post("/entrance")
    origins = list(dict.fromkeys(urls_of(server)))
    links = [f"{origin}/enter#{made['code']}" for origin in origins]
    return {"urls": origins, "links": links, "expiresInS": made["expiresInS"]}


def print_links(experiment_id: str, server: ManagerProcess) -> None:
    """Print the login links. An error is reported as a warning, because the experiment is served anyway."""
    try:
        found = links_to(experiment_id, server)
    except (ManagerUnresponsive, ManagerRefusal) as error:
        output.warning(str(error))
        return
    output.plain("The Web UI urls are:")
    for link in found["links"]:
        output.plain(f"  {link}")
    output.plain(
        f"Each logs in one browser, within {found['expiresInS'] // 60} minutes; `nnictl webui url` prints more."
    )


def urls_of(server: ManagerProcess) -> Iterator[str]:
    """The URLs at which a manager answers, without any secret."""
    hosts = list(_addresses_here(server.host)) if server.host in _EVERYWHERE else [server.host]
    for host in hosts:
        yield dataclasses.replace(server, host=host).base_url


def _addresses_here(everywhere: str) -> Iterator[str]:
    import psutil

    families = (socket.AF_INET,) if everywhere == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)
    for name in sorted(interfaces := psutil.net_if_addrs()):
        for address in interfaces[name]:
            # A link-local IPv6 address is unusable without its interface.
            if address.family in families and "%" not in address.address:
                yield address.address
