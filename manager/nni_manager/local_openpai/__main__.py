"""The local OpenPAI daemon: one cluster and its REST API. `nnictl openpai start` runs this program in the background."""

import argparse
import asyncio
import contextlib
import getpass
import logging
import logging.handlers
import re
import secrets
import signal
import sys
import time
from pathlib import Path

from nni_manager.startup import deferred_gc

# isort: split

from nni_manager.errors import NniManagerError, UserError
from nni_manager.local_openpai import settings
from nni_manager.local_openpai.accounts import Accounts, new_user
from nni_manager.local_openpai.api import OpenPaiApi
from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.daemon import HOST, Credentials, ServiceProcess, StateFolder
from nni_manager.local_openpai.errors import ApiError
from nni_manager.startup import open_files
from nni_manager.support import log_format
from nni_manager.support.http_server import OWN_NAMES, HttpServer, listen
from trial_keeper import __version__
from trial_keeper.wire.small_files import replace_file

log = logging.getLogger("nni_manager.local_openpai")

# Maximum size of service.log and of the rotated file.
_LOG_BYTES = 10 * 2**20


def main() -> int:
    """Serve until a signal arrives; returns the exit code."""
    deferred_gc.start()
    parser = argparse.ArgumentParser(prog="python -m nni_manager.local_openpai", description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True, help="the daemon's state directory")
    parser.add_argument("--host", default=HOST, help="the address to listen on")
    parser.add_argument("--port", type=int, default=settings.DEFAULT_PORT)
    parser.add_argument(
        "--storage", action="append", default=[], metavar="[NAME=]DIR", help="a folder that jobs can mount"
    )
    parser.add_argument(
        "--virtual-cluster", action="append", default=[], metavar="NAME=CPUS,MEMORY_MB,GPUS",
        help="the total resources of the jobs in this virtual cluster",
    )  # fmt: skip
    parser.add_argument(
        "--sandbox", choices=[each.value for each in settings.Sandbox], default=settings.Sandbox.PROCESS.value
    )
    parser.add_argument("--notification-url", metavar="URL", help="a URL to which job changes are posted")
    parser.add_argument(
        "--notification-file", type=settings.absolute, metavar="FILE", help="a file to which job changes are appended"
    )  # fmt: skip
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="an origin whose pages may use the API",
    )
    arguments = parser.parse_args()
    state = StateFolder(arguments.state_dir.absolute())
    try:
        state.make()
        open_files.raise_limit()  # each container that runs needs some
        with state.owned():
            _log_to(state.log)
            asyncio.run(_serve(state, arguments.host, _options(arguments, state)))
    except (NniManagerError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


def _options(arguments: argparse.Namespace, state: StateFolder) -> settings.Options:
    storages = dict(map(settings.storage_of, arguments.storage))
    if not storages:
        state.storage.mkdir(exist_ok=True)
        storages = {settings.DEFAULT_STORAGE: str(state.storage)}
    for name, folder in storages.items():
        if not Path(folder).is_dir():
            log.warning("cannot find folder %s of storage %s; create the folder again", folder, name)
    return settings.Options(
        arguments.port,
        storages,
        dict(map(settings.virtual_cluster_of, arguments.virtual_cluster)),
        arguments.sandbox,
        arguments.notification_url,
        arguments.notification_file,
        list(map(settings.origin_of, arguments.allow_origin)),
    )


async def _serve(state: StateFolder, host: str, options: settings.Options) -> None:
    loop, must_end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, must_end.set)
    listener = listen(host, options.port, "choose another port with `nnictl openpai start --port N`")
    cluster = Cluster(options.settings(state.cluster))
    process = ServiceProcess.here(host, options)
    api = OpenPaiApi(cluster, _accounts(state), lambda accounts: _store(state, accounts), process.address)
    web = HttpServer(api.app(OWN_NAMES if host == HOST else ["*"], options.allowed_origins))
    try:
        await cluster.start()
        serving = loop.create_task(web.serve(sockets=[listener]))
        state.write_process(process)
        log.info("local OpenPAI %s listens on %s", __version__, process.address)
        waiting = [loop.create_task(each) for each in (must_end.wait(), cluster.wait_until_broken())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        web.end()
        await serving
    finally:
        await cluster.close()  # raises the worker's error, if any
    log.info("local OpenPAI has stopped")


def _accounts(state: StateFolder) -> Accounts:
    """The accounts, including the owner's, whose credentials are created if necessary."""
    try:
        accounts = Accounts.from_json(state.accounts.read_text()) if state.accounts.exists() else Accounts()
    except ValueError as error:
        raise UserError(
            f"cannot read {state.accounts}: {error}; remove the file, which revokes all tokens, and start again"
        ) from error
    credentials, now_s = state.credentials(), time.time()
    if credentials is None or not _is_valid(accounts, credentials, now_s):
        name = credentials.user if credentials else _name_of_owner()
        if name not in {user.name for user in accounts.users()}:
            # A random password: the owner logs in with the token, so no password has to be stored.
            accounts.add_user(new_user(name, secrets.token_urlsafe(32), is_admin=True))
        credentials = Credentials(name, accounts.issue(name, now_s, None))
        log.info("created a new token for the owner, %s", name)
    accounts.make_owners(credentials.token)
    _store(state, accounts)
    # Rewritten at each start: earlier versions also stored the owner's password in this file.
    state.write_credentials(credentials)
    return accounts


def _is_valid(accounts: Accounts, credentials: Credentials, now_s: float) -> bool:
    with contextlib.suppress(ApiError):
        accounts.caller(credentials.token, now_s)
        return True
    return False


def _name_of_owner() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # in a container the uid may have no name
        name = ""
    return re.sub("[^A-Za-z0-9_.-]", "", name)[:64] or "user"


def _store(state: StateFolder, accounts: Accounts) -> None:
    replace_file(state.accounts, accounts.to_json().encode(), 0o600, is_durable=True)


def _log_to(path: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1)
    handler.setFormatter(log_format.formatter("text"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    # Omit uvicorn's tracebacks of lost connections.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
