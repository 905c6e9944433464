"""nnictl webui: the addresses of an experiment, for a browser or a program."""

from __future__ import annotations

from nni_manager.cli import options
from nni_manager.cli.options import example, experiment_argument, group, json_option
from nni_manager.client import output
from nni_manager.client.links import links_to
from nni_manager.errors import UserError

webui = group(
    "webui",
    "Print the addresses of an experiment, for a browser or a program.",
    "nnictl webui url",
)


@webui.command(epilog=example("nnictl webui url", "nnictl webui url GvTf2bVe --json"))
@experiment_argument
@json_option
def url(experiment_id: str | None, as_json: bool) -> None:
    """Print a login link to the web page of an experiment.

    If the API listens on all addresses, one link is printed for each address of this machine. The first browser that opens one
    of them within ten minutes is logged in for a week. No link contains the token that programs need, because browsers and
    proxies record URLs.
    """
    known = options.experiment(experiment_id)
    server = known.manager or known.view
    if server is None:
        name = known.experiment_id
        raise UserError(
            f"cannot print the address of experiment {name}: it is not running; `nnictl view {name}` serves its stored data"
        )
    found = links_to(known.experiment_id, server)
    if as_json:
        token_file = known.folder.token_file(is_view=known.manager is None)
        output.print_json(
            found | {"certificateSha256": server.certificate_sha256, "tokenFile": str(token_file)}
        )
        return
    for each in found["links"]:
        output.plain(each)
