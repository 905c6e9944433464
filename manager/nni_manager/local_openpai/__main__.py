"""The process of the local OpenPAI: one cluster, and its REST API. `nnictl openpai start` runs it in the background."""

import argparse
import asyncio
import contextlib
import getpass
import logging
import logging.handlers
import os
import re
import secrets
import signal
import sys
import time
from pathlib import Path

from nni_manager.errors import NniManagerError, UserMistake
from nni_manager.local_openpai.accounts import Accounts, new_user
from nni_manager.local_openpai.api import Api
from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.refusals import Refused
from nni_manager.local_openpai.service import (
    DEFAULT_PORT,
    DEFAULT_STORAGE,
    HOST,
    Credentials,
    Options,
    ServiceProcess,
    StateFolder,
    write_private,
)
from nni_manager.local_openpai.settings import ClusterSettings, Sandbox, StorageSettings, this_machine
from nni_manager.serving import OWN_NAMES, HttpServer, listen
from nni_manager.training_services.local.gpus import gpus_of_this_machine
from trial_keeper import __version__

log = logging.getLogger("nni_manager.local_openpai")

# Of service.log and of the one before it, each.
_LOG_BYTES = 10 * 2**20


def main() -> int:
    """Serve until a signal comes; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nni_manager.local_openpai", description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True, help="the folder of the service's own")
    parser.add_argument("--host", default=HOST, help="where to listen")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument(
        "--storage", type=_storage, action="append", metavar="NAME=PATH", help="a folder that jobs can mount"
    )
    parser.add_argument("--sandbox", choices=[each.value for each in Sandbox], default=Sandbox.PROCESS.value)
    arguments = parser.parse_args()
    state = StateFolder(arguments.state_dir.absolute())
    try:
        state.make()
        with state.owned():
            _log_to(state.log)
            storages = dict(arguments.storage or [(DEFAULT_STORAGE, str(_made(state.storage)))])
            options = Options(arguments.port, storages, arguments.sandbox)
            asyncio.run(_serve(state, arguments.host, options))
    except (NniManagerError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


def _storage(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or not re.fullmatch("[A-Za-z0-9_.-]+", name):
        raise argparse.ArgumentTypeError(f"cannot use {text}: write NAME=PATH")
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(
            f"cannot use {path}: there is no such folder; make it, or name another"
        )
    return name, str(Path(path).absolute())


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


async def _serve(state: StateFolder, host: str, options: Options) -> None:
    loop, must_end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, must_end.set)
    listener = listen(host, options.port, "choose another port with --port N")
    cluster = Cluster(
        ClusterSettings(
            state_dir=state.cluster,
            virtual_clusters={"default": this_machine(len(gpus_of_this_machine()))},
            storages=tuple(StorageSettings(name, Path(path)) for name, path in options.storages.items()),
            sandbox=Sandbox(options.sandbox),
        )
    )
    process = ServiceProcess(os.getpid(), host, __version__, options)
    api = Api(cluster, _accounts(state), lambda accounts: _store(state, accounts), process.address)
    web = HttpServer(api.app(OWN_NAMES if host == HOST else ["*"]))
    try:
        await cluster.start()
        serving = loop.create_task(web.serve(sockets=[listener]))
        state.write_process(process)
        log.info("local OpenPAI %s listens on %s", __version__, process.address)
        await must_end.wait()
        web.should_exit = True
        await serving
    finally:
        await cluster.close()
    log.info("local OpenPAI ends")


def _accounts(state: StateFolder) -> Accounts:
    """The accounts, with the owner among them, whose credentials open them."""
    try:
        accounts = Accounts.from_json(state.accounts.read_text()) if state.accounts.exists() else Accounts()
    except ValueError as error:
        raise UserMistake(
            f"cannot read {state.accounts}: {error}; remove it (every token ends with it), and start again"
        ) from error
    credentials, now_s = state.credentials(), time.time()
    if credentials is not None:
        with contextlib.suppress(Refused):
            accounts.caller(credentials.token, now_s)
            return accounts
    name = credentials.user if credentials else _name_of_owner()
    password = credentials.password if credentials else secrets.token_urlsafe(16)
    accounts.put_user(new_user(name, password, is_admin=True))
    token = accounts.issue(name, now_s, None)
    _store(state, accounts)
    state.write_credentials(Credentials(name, password, token))
    log.info("%s, the owner, has a new token", name)
    return accounts


def _name_of_owner() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number without a name
        name = ""
    return re.sub("[^A-Za-z0-9_.-]", "", name)[:64] or "user"


def _store(state: StateFolder, accounts: Accounts) -> None:
    write_private(state.accounts, accounts.to_json().encode())


def _log_to(path: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1)
    logging.basicConfig(
        handlers=[handler], level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    # Their tracebacks of lost connections are no news for anybody.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
