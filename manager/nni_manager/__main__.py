"""The manager's process: one experiment, its keepers on port + 1, its HTTP API on the port. Started by nnictl."""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import field
from functools import partial
from pathlib import Path

from nni_manager.startup import deferred_gc
from trial_keeper.frozen_dataclass import dataclass

# isort: split

from nni_manager.startup import (
    grpc_logging,  # noqa: F401 - must be the first import of gRPC
    single_threaded_blas,  # noqa: F401 - must be the first import of NumPy
)

# isort: split

from nni_manager.config.model import ExperimentSpec
from nni_manager.engine.engine import Engine
from nni_manager.engine.stored_experiment import StoredExperimentReader
from nni_manager.errors import NniManagerError
from nni_manager.grpc_server.servicer import KeeperServer
from nni_manager.startup import open_files
from nni_manager.store.certificate import Certificate
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.lease import Lease
from nni_manager.store.reader import StoreReader
from nni_manager.support import log_format
from nni_manager.support.http_server import is_loopback, listen
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.training_services.platform import platform_of
from nni_manager.tuner.registry import make_assessment, make_tuner
from nni_manager.web.api import ManagerApi
from nni_manager.web.published_server import PublishedServer
from nni_manager.web.session_auth import SessionAuth
from trial_keeper import __version__
from trial_keeper.programs import foreign_nnictl

log = logging.getLogger("nni_manager")

_OTHER_PORT = "choose another with --port N, or --port auto"
# The client that stops the experiment polls its summary twice a second.
_LEFTOVERS_READ_S = 2.0
_OTHER_PORTS = "choose another pair of ports with --port N (keepers use N + 1), or --port auto"

# Thresholds of Python's cycle collector: net allocations, then counts of younger collections. Ingest allocates a hundred thousand
# objects that belong to no cycle. With the defaults, Python scanned them, and all modules, many times a second, and a report
# waited 50 ms.
_COLLECTION = (10_000, 10, 10)
# Time after which a waiting thread requests Python's lock. Storing a report takes about six statements. After each, the store's
# thread may wait for the event loop's thread, which reads many messages: with the default of 5 ms that took 30 ms.
_SWITCH_S = 0.0005
# NNI's names of log levels that Python names differently.
_LEVELS = {"trace": logging.DEBUG, "fatal": logging.CRITICAL}


def main() -> int:
    """Own one experiment until it is stopped; return the exit code."""
    deferred_gc.start()
    parser = argparse.ArgumentParser(prog="python -m nni_manager", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the experiment's folder")
    WebServerOptions.add_to(parser)
    parser.add_argument(
        "--port", type=int, required=True, help="the port of the HTTP API; keepers use the next port"
    )
    parser.add_argument("--debug", action="store_true", help="write a verbose log")
    parser.add_argument(
        "--log_format", choices=log_format.FORMATS, default="text", help="of the manager's log"
    )
    parser.add_argument(
        "--view", action="store_true", help="serve the stored data read-only, even while a manager runs"
    )
    parser.add_argument(
        "--parent_death_pipe",
        type=int,
        metavar="FD",
        help="an inherited pipe; when its other end is closed, stop the experiment or end the view",
    )
    arguments = parser.parse_args()
    parent_death_pipe: int | None = arguments.parent_death_pipe
    if parent_death_pipe is not None:
        os.set_inheritable(parent_death_pipe, False)
    web, port = WebServerOptions.of(arguments), arguments.port
    folder = ExperimentFolder(arguments.folder)
    # nnictl starts this process in the experiment's folder, which Python adds to its path. Trials and archives write there: a
    # `code/__init__.py` would replace a module of the standard library.
    sys.path[:] = [each for each in sys.path if os.path.realpath(each) != os.path.realpath(folder.path)]
    try:
        if arguments.view:
            with folder.viewed():
                asyncio.run(_view(folder, web, port, parent_death_pipe))
            return 0
        folder.check_files_of_manager()
        with StoreReader(folder.database) as reader:
            config = ExperimentSpec.from_json(reader.experiment().config)
        if not config.cluster.is_this_machine:
            # Containers run as other users and read what the manager writes to shared storage. The experiment's folder stays
            # closed.
            os.umask(0o022)
        open_files.raise_limit()
        with folder.owned() as lease:
            gc.set_threshold(*_COLLECTION)
            sys.setswitchinterval(_SWITCH_S)
            level = "debug" if arguments.debug or config.debug else config.log_level
            _log_to(folder, level, arguments.log_format)
            if (foreign := foreign_nnictl()) is not None:
                log.warning(
                    "%s, which a shell finds first, is another package's nnictl; write `trial-keeper ctl` instead",
                    foreign,
                )
            manager = _Manager(config, folder, web, port, parent_death_pipe)
            return asyncio.run(manager.run(lease))
    except (NniManagerError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1


async def _view(
    folder: ExperimentFolder, web: WebServerOptions, port: int, parent_death_pipe: int | None
) -> None:
    """Serve the stored experiment, read-only, until a signal or the end of the parent process."""
    loop, must_end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, must_end.set)
    _call_on_eof(loop, parent_death_pipe, must_end.set)
    listener = listen(web.host, port, _OTHER_PORT)
    with StoreReader(folder.database) as reader:
        secret = reader.experiment().secret
    with contextlib.closing(StoredExperimentReader(folder)) as view:
        published = PublishedServer(
            folder, web, port, lambda: folder.certificate(_names_here(web.host)), is_view=True
        )
        session_auth = SessionAuth(secret, folder.experiment_id, folder.ended_sessions)
        api = ManagerApi(view, web, port, session_auth, must_end.set, published.hosts)
        server = published.serving(api.app())
        serving = loop.create_task(server.serve(sockets=[listener]))
        published.publish(session_auth.token)
        await must_end.wait()
        server.end()
        await serving


@dataclass(frozen=True, slots=True)
class _Manager:
    """Creates, connects and runs the parts of the manager."""

    config: ExperimentSpec
    folder: ExperimentFolder
    web: WebServerOptions
    port: int
    parent_death_pipe: int | None
    must_end: asyncio.Event = field(default_factory=asyncio.Event)
    end_requested: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, lease: Lease) -> int:
        """Serve until a signal, a failure, or a requested end of the experiment; return the exit code.

        Raises:
            LeaseLost: another manager owns the experiment now.
        """
        loop, platform = asyncio.get_running_loop(), platform_of(self.config)
        if self.folder.workspace.root == self.folder.path:  # there is no link
            storage = platform.storage_here()
            if storage is not None:
                self.folder.restore_link(storage)
        listener = listen(self.web.host, self.port, _OTHER_PORTS)
        make_service = await asyncio.to_thread(platform.make_service, self.folder)
        address = platform.address_for_keepers()
        keepers_host = platform.address_to_listen_on(address)

        def own_certificate() -> Certificate:
            return self.folder.certificate(_names_here(address, self.web.host))

        published = PublishedServer(
            self.folder, self.web, self.port, own_certificate, check_before=lease.check
        )
        for_keepers = None if is_loopback(keepers_host) else own_certificate()
        # Only a check: gRPC opens its port itself, with a less clear error.
        listen(keepers_host, self.port + 1, _OTHER_PORTS).close()
        engine = Engine(
            self.config,
            self.folder,
            make_service,
            lambda config: make_tuner(config, platform_of(config).checkpoints(self.folder), self.folder.log),
            make_assessment(self.config, self.folder.log),
            lease,
        )
        keeper_server = KeeperServer(engine.admission)
        session_auth = SessionAuth(
            engine.stored.secret, self.folder.experiment_id, self.folder.ended_sessions
        )
        end = self.end_requested.set
        api = ManagerApi(engine, self.web, self.port, session_auth, end, published.hosts)
        web_server = published.serving(api.app())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.must_end.set)
        lease.call_when_lost(lambda error: loop.call_soon_threadsafe(engine.runtime.on_lease_lost, error))
        try:
            await engine.restore()
            await keeper_server.start(keepers_host, self.port + 1, for_keepers)
            lease.check()  # the next call publishes this manager's address to keepers
            await engine.start(
                (f"{address}:{self.port + 1}",),
                None if for_keepers is None else for_keepers.certificate_pem,
            )
            serving = loop.create_task(web_server.serve(sockets=[listener]))
            published.publish(session_auth.token)
            log.info(
                "experiment %s: manager %s listens on port %d",
                self.folder.experiment_id,
                __version__,
                self.port,
            )
            _call_on_eof(loop, self.parent_death_pipe, partial(self._stop, engine))
            gc.freeze()  # the objects created so far live as long as the process
            await self._until_end(engine)
            web_server.end()
            await serving
        finally:
            await engine.close()
            await keeper_server.stop()
        log.info("experiment %s: the manager exits", self.folder.experiment_id)
        if engine.runtime.lease_lost is not None:
            raise engine.runtime.lease_lost
        return 1 if engine.runtime.failed.is_set() else 0

    def _stop(self, engine: Engine) -> None:
        log.info(
            "experiment %s: stopping, because the program that started it has ended",
            self.folder.experiment_id,
        )
        engine.stop()
        self.end_requested.set()

    async def _until_end(self, engine: Engine) -> None:
        """Return on a signal, on a failure, or when the experiment is terminal and its end was requested.

        A DONE experiment stays available for viewing.
        """
        ends = (self.must_end.wait(), self._until_over(engine), engine.runtime.failed.wait())
        waiting = [asyncio.ensure_future(end) for end in ends]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for future in waiting:
            future.cancel()

    async def _until_over(self, engine: Engine) -> None:
        await self.end_requested.wait()
        await engine.until_stopped()
        if engine.recovery.leftovers:
            await asyncio.sleep(_LEFTOVERS_READ_S)


def _call_on_eof(
    loop: asyncio.AbstractEventLoop, parent_death_pipe: int | None, call: Callable[[], None]
) -> None:
    """Call `call` once the other end of the pipe is closed. The pipe is never written to."""
    if parent_death_pipe is None:
        return

    def on_eof() -> None:
        loop.remove_reader(parent_death_pipe)
        call()

    loop.add_reader(parent_death_pipe, on_eof)


def _names_here(*addresses: str) -> set[str]:
    """Host names and addresses of this machine."""
    names = {*addresses, "localhost", "127.0.0.1", socket.gethostname()} - {"0.0.0.0", "::"}
    return {name for name in names if name.isascii()}


def _log_to(folder: ExperimentFolder, level: str, format_name: str) -> None:
    # Fields that the format does not show, but that cost a lookup per line; a trial logs three lines. Source: Python's logging
    # HOWTO, "Optimization".
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # A message may quote names of files that are not UTF-8.
    handler = logging.FileHandler(folder.manager_log, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(log_format.formatter(format_name))
    logging.basicConfig(handlers=[handler], level=_LEVELS.get(level, level.upper()))
    # Omit tracebacks of lost connections, and warnings about invalid HTTP: any peer could fill the disk with them.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # urllib3 logs every URL, and the URLs of logs contain a token.
    logging.getLogger("urllib3").setLevel(logging.WARNING)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python would wait for a tuner that computes in its thread.
    os._exit(code)
