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
from functools import partial
from pathlib import Path

from nni_manager import quiet_grpc  # noqa: F401 - it has to be the first that imports gRPC

# isort: split

from nni_manager import open_files, services
from nni_manager.config.model import ExperimentConfig
from nni_manager.engine.engine import Engine
from nni_manager.engine.view import View
from nni_manager.errors import NniManagerError
from nni_manager.service.servicer import KeeperServer
from nni_manager.serving import HttpServer, is_loopback, listen
from nni_manager.store.folders import ExperimentFolder, ManagerProcess
from nni_manager.store.ownership import Ownership
from nni_manager.store.store import StoreReader
from nni_manager.tuner.assessors import make_assessment
from nni_manager.tuner.registry import make_tuner
from nni_manager.web.api import Api
from nni_manager.web.entrance import Entrance
from trial_keeper import __version__

log = logging.getLogger("nni_manager")

_OTHER_PORT = "choose another with --port N, or --port auto"
_OTHER_PORTS = "choose another pair of ports with --port N (keepers use N + 1), or --port auto"

# Python looks for cycles when so many objects more were made than let go of, and at all there are after so many looks at the
# newest. What keepers bring is a hundred thousand that belong to no cycle; by its own numbers Python looked at them, and at all
# modules, many times a second, and a report waited 50 ms for it.
_COLLECTION = (10_000, 10, 10)
# A thread that wants to go on waits so long for one that does not let it. A report is stored in some six statements, and after
# each the store's thread may wait for the loop's, which reads a flood: with Python's own 5 ms that made 30.
_SWITCH_S = 0.0005
# NNI's words for levels that Python calls otherwise.
_LEVELS = {"trace": logging.DEBUG, "fatal": logging.CRITICAL}


def main() -> int:
    """Own one experiment until it is stopped; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nni_manager", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the experiment's folder")
    parser.add_argument("--host", default="127.0.0.1", help="where the HTTP API listens")
    parser.add_argument(
        "--port", type=int, required=True, help="of the HTTP API; keepers connect to the next one"
    )
    parser.add_argument("--debug", action="store_true", help="log more")
    parser.add_argument(
        "--view", action="store_true", help="only show what is stored, beside a manager or without one"
    )
    parser.add_argument(
        "--lifeline",
        type=int,
        metavar="FD",
        help="a pipe that this process inherits; once its other end is closed, stop the experiment, or end the view",
    )
    arguments = parser.parse_args()
    lifeline: int | None = arguments.lifeline
    if lifeline is not None:
        os.set_inheritable(lifeline, False)
    folder = ExperimentFolder(arguments.folder)
    # nnictl starts it there, and Python looks for modules where it is started. But trials and archives write there, and a
    # `code/__init__.py` would pass for a module of Python's own.
    sys.path[:] = [each for each in sys.path if os.path.realpath(each) != os.path.realpath(folder.path)]
    try:
        if arguments.view:
            with folder.viewed():
                asyncio.run(_view(folder, arguments.host, arguments.port, lifeline))
            return 0
        with StoreReader(folder.database) as reader:
            config = ExperimentConfig.from_json(reader.experiment().config)
        if config.pai is not None or config.kubernetes is not None:
            # What it writes on the shared storage is for the users that containers run as. Its own folder stays closed.
            os.umask(0o022)
        open_files.raise_limit()
        with folder.owned() as ownership:
            gc.set_threshold(*_COLLECTION)
            sys.setswitchinterval(_SWITCH_S)
            _log_to(folder, "debug" if arguments.debug or config.debug else config.log_level)
            manager = _Manager(config, folder, arguments.host, arguments.port, lifeline)
            return asyncio.run(manager.run(ownership))
    except (NniManagerError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1


async def _view(folder: ExperimentFolder, host: str, port: int, lifeline: int | None) -> None:
    """Serve what is stored of the experiment until this process is told to end."""
    loop, must_end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, must_end.set)
    _call_when_cut(loop, lifeline, must_end.set)
    listener = listen(host, port, _OTHER_PORT)
    certificate = None if is_loopback(host) else folder.certificate(_names_here(host))
    path, sha256 = (None, None) if certificate is None else (certificate.path, certificate.sha256)
    with StoreReader(folder.database) as reader:
        entrance = Entrance(reader.experiment().secret, folder.experiment_id, folder.ended_sessions)
    with contextlib.closing(View(folder)) as view:
        web = HttpServer(Api(view, host, port, entrance, must_end.set).app(), path)
        serving = loop.create_task(web.serve(sockets=[listener]))
        folder.write_view(ManagerProcess(os.getpid(), host, port, __version__, entrance.token, sha256))
        await must_end.wait()
        web.should_exit = True
        await serving


class _Manager:
    """Puts the parts together."""

    def __init__(
        self, config: ExperimentConfig, folder: ExperimentFolder, host: str, port: int, lifeline: int | None
    ) -> None:
        self._config = config
        self._folder = folder
        self._host = host
        self._port = port
        self._lifeline = lifeline
        self._must_end = asyncio.Event()
        self._end_asked = asyncio.Event()

    async def run(self, ownership: Ownership) -> int:
        """Serve until somebody ends the experiment, or this process."""
        loop = asyncio.get_running_loop()
        listener = listen(self._host, self._port, _OTHER_PORTS)
        make_service = await asyncio.to_thread(services.make_service, self._config, self._folder)
        address = services.address_for_keepers(self._config)
        keepers_host = services.listens_at(address)
        certificate = None
        if not (is_loopback(keepers_host) and is_loopback(self._host)):
            certificate = self._folder.certificate(_names_here(address, self._host))
        for_keepers = None if is_loopback(keepers_host) else certificate
        for_people = None if is_loopback(self._host) else certificate
        # Only a look: gRPC opens its port itself, and says less clearly why it cannot.
        listen(keepers_host, self._port + 1, _OTHER_PORTS).close()
        engine = Engine(
            self._config,
            self._folder,
            make_service,
            lambda config: make_tuner(
                config, services.checkpoints_of(config, self._folder), self._folder.log
            ),
            make_assessment(self._config, self._folder.log),
        )
        server = KeeperServer(engine.keepers)
        folder = self._folder
        entrance = Entrance(engine.stored.secret, folder.experiment_id, folder.ended_sessions)
        web = HttpServer(
            Api(engine, self._host, self._port, entrance, self._end_when_over).app(),
            None if for_people is None else for_people.path,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._must_end.set)
        ownership.call_when_lost(partial(loop.call_soon_threadsafe, engine.note_taken))
        try:
            await engine.restore()
            await server.start(keepers_host, self._port + 1, for_keepers)
            await engine.start(
                (f"{address}:{self._port + 1}",),
                None if for_keepers is None else for_keepers.certificate_pem,
            )
            serving = loop.create_task(web.serve(sockets=[listener]))
            self._folder.write_process(
                ManagerProcess(
                    os.getpid(),
                    self._host,
                    self._port,
                    __version__,
                    entrance.token,
                    None if for_people is None else for_people.sha256,
                )
            )
            self._folder.hold_process()  # until this process ends
            log.info(
                "experiment %s: manager %s listens on port %d",
                self._folder.experiment_id,
                __version__,
                self._port,
            )
            _call_when_cut(loop, self._lifeline, partial(self._stop, engine))
            gc.freeze()  # what is here by now stays
            await self._until_end(engine)
            web.should_exit = True
            await serving
        finally:
            await engine.close()
            await server.stop()
        log.info("experiment %s: the manager ends", self._folder.experiment_id)
        return 1 if engine.failed.is_set() else 0

    def _stop(self, engine: Engine) -> None:
        log.info("experiment %s: stops, as the program that wanted it has ended", self._folder.experiment_id)
        engine.stop()
        self._end_when_over()

    def _end_when_over(self) -> None:
        self._end_asked.set()

    async def _until_end(self, engine: Engine) -> None:
        """Ends on a signal, or when the experiment is over and somebody asked for the end.

        An experiment that is DONE stays to be looked at.
        """
        killed = asyncio.ensure_future(self._must_end.wait())
        over = asyncio.ensure_future(_both(self._end_asked, engine.finished))
        failed = asyncio.ensure_future(engine.failed.wait())
        waiting = {killed, over, failed}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for future in waiting:
            future.cancel()


def _call_when_cut(loop: asyncio.AbstractEventLoop, lifeline: int | None, call: Callable[[], None]) -> None:
    """Call once the other end of the pipe is closed; nobody writes into it."""
    if lifeline is None:
        return

    def note_cut() -> None:
        loop.remove_reader(lifeline)
        call()

    loop.add_reader(lifeline, note_cut)


def _names_here(*addresses: str) -> set[str]:
    """What this machine is called."""
    names = {*addresses, "localhost", "127.0.0.1", socket.gethostname()} - {"0.0.0.0", "::"}
    return {name for name in names if name.isascii()}


async def _both(first: asyncio.Event, second: asyncio.Event) -> None:
    await first.wait()
    await second.wait()


def _log_to(folder: ExperimentFolder, level: str) -> None:
    # Looked up for each line, three of each trial, and not shown. Source: Python's logging HOWTO, "Optimization".
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(
        filename=folder.manager_log,
        level=_LEVELS.get(level, level.upper()),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    # Their tracebacks of lost connections are no news for anybody.
    # And what is no HTTP is a stranger's, who could fill the disk with it.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # Says every address it asks, and those of logs hold a token.
    logging.getLogger("urllib3").setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
