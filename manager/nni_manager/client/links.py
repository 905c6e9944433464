"""Login links to the web page of an experiment."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from typing import Any

from nni_manager.client import output
from nni_manager.client.hub_folder import hub_folder
from nni_manager.client.manager_client import ManagerClient, ManagerRefusal, ManagerUnresponsive
from nni_manager.store.folders import FolderUnreadable, ManagerProcess

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
    """Print the login links: to the experiment on the page of all experiments, if that is served, or to its own page.

    An error is reported as a warning, because the experiment is served anyway.
    """
    try:
        found = _links_by_hub(experiment_id) or links_to(experiment_id, server)
    except (ManagerUnresponsive, ManagerRefusal) as error:
        output.warning(str(error))
        return
    output.plain("The Web UI urls are:")
    for link in found["links"]:
        output.plain(f"  {link}")
    output.plain(
        f"Each logs in one browser, within {found['expiresInS'] // 60} minutes; `nnictl webui url` prints more."
    )


def _links_by_hub(experiment_id: str) -> dict[str, Any] | None:
    folder = hub_folder()
    with contextlib.suppress(
        FolderUnreadable, ManagerUnresponsive
    ):  # then the experiment's own page is enough
        if (hub := folder.running_view()) is not None:
            found = links_to(folder.experiment_id, hub)
            return found | {
                "links": [
                    link.replace("/enter#", f"/experiments/{experiment_id}/enter#") for link in found["links"]
                ]
            }
    return None


def urls_of(server: ManagerProcess) -> Iterator[str]:
    """The URLs at which a manager answers, without any secret. That for which browsers accept the certificate is the first."""
    if server.certificate_host:
        yield dataclasses.replace(server, host=server.certificate_host).base_url
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
