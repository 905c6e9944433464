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
from nni_manager.store.folders import ExperimentFolder, ManagerProcess
from nni_manager.support.http_server import HttpServer, is_loopback, listen
from nni_manager.web.session_auth import SessionAuth
from trial_keeper import __version__


def main() -> int:
    """Serve until a signal; return the exit code."""
    deferred_gc.start()
    parser = argparse.ArgumentParser(prog="python -m nni_manager.hub", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the folder of its files")
    parser.add_argument("--host", default="127.0.0.1", help="the listen address")
    parser.add_argument("--port", type=int, required=True, help="the port")
    parser.add_argument("--url_prefix", default="", help="the path before all addresses, as /lab")
    arguments = parser.parse_args()
    folder = ExperimentFolder(arguments.folder)
    # Modules must not be imported from the working directory.
    sys.path[:] = [each for each in sys.path if os.path.realpath(each) != os.path.realpath(folder.path)]
    try:
        with folder.viewed():
            asyncio.run(_serve(folder, arguments.host, arguments.port, arguments.url_prefix))
    except (NniManagerError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


async def _serve(folder: ExperimentFolder, host: str, port: int, url_prefix: str) -> None:
    loop, must_end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, must_end.set)
    listener = listen(host, port, "choose another with --port N, or --port auto")
    certificate = (
        None
        if is_loopback(host)
        else folder.certificate({host, "localhost", "127.0.0.1"} - {"0.0.0.0", "::"})
    )
    session_auth = SessionAuth(secret_of(folder), folder.experiment_id, folder.ended_sessions)
    hub = HubApi(folder.experiment_id, host, port, session_auth, url_prefix)
    path, sha256 = (None, None) if certificate is None else (certificate.path, certificate.sha256)
    with contextlib.closing(hub):
        web = HttpServer(hub.app(), path)
        serving = loop.create_task(web.serve(sockets=[listener]))
        folder.write_process(
            ManagerProcess(os.getpid(), host, port, __version__, session_auth.token, sha256, url_prefix),
            is_view=True,
        )
        warming = loop.create_task(hub.warm_up())
        await must_end.wait()
        warming.cancel()
        web.end()
        await serving


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Python would wait for the threads that wait for an event stream's next bytes, or for a frozen manager.
    os._exit(code)
