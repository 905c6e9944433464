"""The process of the server of all experiments. Started by `nnictl web`."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from nni_manager.startup import deferred_gc

# isort: split

from nni_manager.client.hub_folder import secret_of
from nni_manager.errors import NniManagerError
from nni_manager.hub.api import HubApi
from nni_manager.store.folders import ExperimentFolder
from nni_manager.support.http_server import listen
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.web.published_server import PublishedServer
from nni_manager.web.session_auth import SessionAuth


def main() -> int:
    """Serve until a signal; return the exit code."""
    deferred_gc.start()
    parser = argparse.ArgumentParser(prog="python -m nni_manager.hub", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the folder of its files")
    WebServerOptions.add_to(parser)
    parser.add_argument("--port", type=int, required=True, help="the port")
    arguments = parser.parse_args()
    folder = ExperimentFolder(arguments.folder)
    # Modules must not be imported from the working directory.
    sys.path[:] = [each for each in sys.path if os.path.realpath(each) != os.path.realpath(folder.path)]
    try:
        with folder.viewed():
            asyncio.run(_serve(folder, WebServerOptions.of(arguments), arguments.port))
    except (NniManagerError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


async def _serve(folder: ExperimentFolder, web: WebServerOptions, port: int) -> None:
    loop, must_end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, must_end.set)
    listener = listen(web.host, port, "choose another with --port N, or --port auto")
    names = {web.host, "localhost", "127.0.0.1"} - {"0.0.0.0", "::"}
    published = PublishedServer(folder, web, port, lambda: folder.certificate(names), is_view=True)
    session_auth = SessionAuth(secret_of(folder), folder.experiment_id, folder.ended_sessions)
    hub = HubApi(folder.experiment_id, web, port, session_auth, published.hosts)
    with contextlib.closing(hub):
        server = published.serving(hub.app())
        serving = loop.create_task(server.serve(sockets=[listener]))
        published.publish(session_auth.token)
        warming = loop.create_task(hub.warm_up())
        await must_end.wait()
        warming.cancel()
        server.end()
        await serving


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Python would wait for the threads that wait for an event stream's next bytes, or for a frozen manager.
    os._exit(code)
