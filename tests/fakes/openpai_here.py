"""A local OpenPAI on a real socket, in a thread of the test process, and its clients."""

import asyncio
import contextlib
import functools
import threading

import requests
from deadlines import DEADLINE_S
from real_experiment import wait_until

from nni_manager.local_openpai.accounts import Accounts, new_user
from nni_manager.local_openpai.api import OpenPaiApi
from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.local_openpai.settings import ClusterSettings, StorageSettings
from nni_manager.support.http_server import OWN_NAMES, HttpServer, listen

JOBS = "/rest-server/api/v2/jobs"
PASSWORDS = {"ada": "ada's password", "bob": "bob's password"}


@contextlib.contextmanager
def an_openpai_here(folder, **settings):
    """OpenPAI with a real cluster and two storages, of which `team` is the default."""
    for name in ("team", "data"):
        (folder / name).mkdir()
    storages = tuple(StorageSettings(name, folder / name, name == "team") for name in ("team", "data"))
    default = {"default": ResourceCounts(cpu=4, memory_mb=16_384, gpu=0)}
    here = OpenPaiHere(Cluster(ClusterSettings(folder / "state", default, storages, 2.0, **settings)))
    try:
        yield here
        here.stop_all()
    finally:
        here.close()


def refused(answer, status, code):
    """Check that a response is a refusal with this status and code; return its message."""
    document = answer.json()
    assert (answer.status_code, document["code"]) == (status, code), answer.text
    assert document.keys() == {"code", "message"}
    return document["message"]


@functools.cache
def _users():
    """The users. They are created once per process, because hashing a password is slow by design."""
    return [new_user(name, password, is_admin=name == "ada") for name, password in PASSWORDS.items()]


class OpenPaiHere:
    """Serves a cluster until it is closed. `ada` is an administrator, `bob` is not. Tests may change
    `now_s` and `disk_error`, with which every change of the accounts fails.
    """

    def __init__(self, cluster):
        self.cluster = cluster
        self.accounts = Accounts()
        self.stored = []
        self.disk_error = None
        for user in _users():
            self.accounts.add_user(user)
        self.now_s = 1_600_000_000.0
        listener = listen("127.0.0.1", 0, "")
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.url = f"http://{self.address}"
        api = OpenPaiApi(
            cluster,
            self.accounts,
            self._store,
            self.address,
            lambda: self.now_s,
        )
        self._server = HttpServer(api.app(OWN_NAMES))
        self.loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self._thread.start()
        assert self._started.wait(DEADLINE_S)

    def _store(self, accounts):
        if self.disk_error is not None:
            raise self.disk_error
        self.stored.append(accounts.to_json())

    def _run(self, listener):
        async def serve():
            await self.cluster.start()
            self._started.set()
            try:
                await self._server.serve(sockets=[listener])
            finally:
                await self.cluster.close()

        with contextlib.closing(self.loop):
            self.loop.run_until_complete(serve())

    def close(self):
        self._server.end()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def stop_all(self):
        """Stop every job and wait for its end."""
        ada = self.client()
        states = {"username": "ada,bob", "state": "WAITING,RUNNING,STOPPING"}
        for job in ada.get(JOBS, params=states).json():
            ada.put(f"{JOBS}/{job['username']}~{job['name']}/executionType", json={"value": "STOP"})
        wait_until(lambda: not ada.get(JOBS, params=states).json(), "all jobs have ended")

    def experiment_keys(self, *, reuse=False):
        """Keys of an experiment file for this OpenPAI. ada's jobs run train.py. The workspace is on storage `team`, under the
        same path in jobs as on this machine.
        """
        (storage,) = (each.path for each in self.cluster.settings.storages if each.name == "team")
        shared = {"nniManagerNFSMountPath": str(storage), "containerNFSMountPath": str(storage)}
        trial = {
            "command": "python3 train.py",
            "codeDir": ".",
            "image": "anything",
            "paiStorageConfigName": "team",
        }
        return {
            "trainingServicePlatform": "pai",
            "trial": {**trial, "gpuNum": 0, "cpuNum": 1, "memoryMB": 256, **shared},
            "paiConfig": {"userName": "ada", "token": self.client().token, "host": self.url, "reuse": reuse},
        }

    def client(self, user="ada", application=True, token=None):
        """A session of this user with a new token, or with the given token. `application` selects the kind of the new token. If
        user and token are None, the session has no login.
        """
        if token is None and user is not None:
            token = self.accounts.issue(user, self.now_s, None if application else 3600)
        return Client(self.url, token)


class Client(requests.Session):
    """A requests session with the server's address and a token."""

    def __init__(self, url, token):
        super().__init__()
        self.trust_env = False
        self.root = url
        self.token = token
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"

    def request(self, method, path, **options):
        # The library requests would remove dot segments such as `..` from a path. So the path is appended after the request is
        # prepared.
        options.pop("allow_redirects", None)
        request = requests.Request(method, self.root, **options)
        prepared = self.prepare_request(request)
        query = prepared.url.partition("?")[2]
        prepared.url = self.root + path + (f"?{query}" if query else "")
        return self.send(prepared, timeout=DEADLINE_S)

    def submit(self, text):
        """POST a job."""
        return self.post("/rest-server/api/v2/jobs", data=text, headers={"Content-Type": "text/yaml"})
