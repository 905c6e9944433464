"""A fake OpenPAI REST server on a real socket. It can inject faults, and run its jobs as processes of this
machine.

It implements what trial-keeper's clients use, with OpenPAI's status codes and bodies. Submitted jobs are kept
for tests; `run_jobs` starts each task with the scripts that OpenPAI's runtime would create.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from pathlib import Path

import anyio
import uvicorn
from deadlines import DEADLINE_S
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from nni_manager.training_services.openpai.export import without_secrets
from nni_manager.training_services.openpai.job_checks import ProtocolInvalid
from nni_manager.training_services.openpai.protocol import parse
from nni_manager.training_services.openpai.render import render
from trial_keeper.settings import without_settings

USER, PASSWORD = "ada", "s3cret-passw0rd"
STORAGE, VIRTUAL_CLUSTER = "confignfs-data", "default"
# If Kubernetes itself ends a pod, OpenPAI reports such a negative exit code and explains it with this phrase.
_OF_KUBERNETES = {-1003: "PodPreemptedForCriticalPod"}
_LIVE = ("WAITING", "RUNNING", "STOPPING")


# OpenPAI explains an exit code with these fields. The explanations of some codes, such as -210, have no `solution`.
EXIT_SPEC = {
    "phrase": "PAIRuntimeUnknownFailed",
    "reason": "the command failed, and nothing in its log tells why",
    "solution": ["read the logs of the task", "correct the command"],
}


class FakeJob:
    """A submitted job."""

    def __init__(self, text: str):
        self.protocol = parse(text)
        self.text = text
        self.user = USER
        self.state = "WAITING"
        self.execution_type = "START"
        self.exit_code: int | None = None
        self.ends_with: int | None = None
        """The code of the job's end in place of its processes'."""
        self.tags: list[str] = []
        self.logs = {"stdout": b"", "stderr": b""}
        self.submitted_at_ms = int(time.time() * 1000)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.files: list[Path] = []

    @property
    def name(self):
        return self.protocol.name

    @property
    def role(self):
        return self.protocol.task_roles[0].mangled_name

    def end(self, state: str, exit_code: int | None = None):
        """End the job."""
        self.state, self.exit_code = state, exit_code

    def row(self):
        return {
            "debugId": hashlib.md5(f"{self.user}~{self.name}".encode()).hexdigest(),
            "name": self.name,
            "username": self.user,
            "state": self.state,
            "executionType": self.execution_type,
            "tags": self.tags,
            "retries": 0,
            "submissionTime": self.submitted_at_ms,
            "completedTime": None if self.state in _LIVE else int(time.time() * 1000),
            "appExitCode": self.exit_code,
            "virtualCluster": self.protocol.virtual_cluster,
            "totalTaskNumber": sum(role.instances for role in self.protocol.task_roles),
        }

    def detail(self):
        status = {key: value for key, value in self.row().items() if key not in ("name", "tags")}
        if self.exit_code is not None:
            # As `appExitCode`, OpenPAI's runtime reports 255 for every failure except signals. It reports the command's own exit
            # code in `originUserExitCode`.
            status |= {
                "appExitCode": 0 if self.exit_code == 0 else 255,
                "appExitMessages": {"runtime": {"originUserExitCode": self.exit_code}},
                "appExitSpec": EXIT_SPEC if self.exit_code else None,
                "appExitTriggerMessage": "FailedTaskCount 1 has reached MinFailedTaskCount 1 in the TaskRole",
                "appExitTriggerTaskRoleName": self.role,
                "appExitTriggerTaskIndex": 0,
            }
        if self.exit_code in _OF_KUBERNETES:
            # Kubernetes ended the pod, so OpenPAI's runtime in the container reported nothing.
            phrase = {"phrase": _OF_KUBERNETES[self.exit_code]}
            status |= {"appExitCode": self.exit_code, "appExitMessages": None, "appExitSpec": phrase}
        tasks = [
            {
                "taskIndex": 0,
                "taskState": self.state,
                "containerExitCode": status["appExitCode"],
                "attemptId": 0,
            }
        ]
        roles = {} if self.state == "WAITING" else {self.role: {"taskStatuses": tasks}}
        return {
            "name": self.name,
            "tags": self.tags,
            "jobStatus": status | {"attemptId": 0},
            "taskRoles": roles,
        }


class FakePai:
    """The fake server. `asked` contains its calls, as (verb, path)."""

    def __init__(
        self,
        *,
        run_jobs: bool = False,
        tasks_begin_with: tuple[str, ...] = (),
        certificate: Path | None = None,
    ):
        """`tasks_begin_with`: the command prefix of each task. `certificate`: a file with a certificate and its key; the server
        then uses HTTPS.
        """
        self.jobs: dict[str, FakeJob] = {}
        self.asked: list[tuple[str, str]] = []
        self.tokens = {"token-of-the-profile-page"}
        self.password = PASSWORD
        self.logins = 0
        self.authn_type = "basic"
        """Or "OIDC": users have no passwords here."""
        self._tls = {} if certificate is None else {"ssl_certfile": certificate, "ssl_keyfile": certificate}
        self.run_jobs = run_jobs
        self.tasks_begin_with = tasks_begin_with
        self.is_hung = threading.Event()
        self.virtual_clusters = [VIRTUAL_CLUSTER, "other"]
        self.usable = {VIRTUAL_CLUSTER}
        """The virtual clusters that the user may submit to."""
        self.shows_rights = True
        self.nodes: dict[str, dict] = {}
        """Node resources as in OpenPAI's API; none by default."""
        self.log_server = "answers"
        """Or "hangs", which sends no byte, or "trickles", which sends a byte now and then."""
        self.log_calls = 0
        self.lists_are_late = False
        """True: job lists do not show any job yet."""
        self._faults: dict[tuple[str, str], deque] = {}
        self._job_was_made = threading.Condition()
        self._folder = tempfile.TemporaryDirectory()
        self._listener: socket.socket | None = None
        self.port = 0

    # ---- life

    def start(self):
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        routes = [
            ("GET", "/info", self._info),
            ("GET", "/authn/info", self._authn_info),
            ("POST", "/authn/basic/login", self._log_in),
            ("GET", "/tokens/check", self._check),
            ("GET", "/jobs", self._list),
            ("POST", "/jobs", self._submit),
            ("GET", "/jobs/{name}", self._detail),
            ("GET", "/jobs/{name}/config", self._config),
            ("PUT", "/jobs/{name}/executionType", self._execute),
            ("PUT", "/jobs/{name}/tag", self._tag),
            ("GET", "/users/{name}", self._user),
            ("GET", "/storages", self._storages),
            ("GET", "/virtual-clusters", self._virtual_clusters),
            (
                "GET",
                "/jobs/{name}/attempts/0/taskRoles/{role}/taskIndex/{index}/attempts/0/logs",
                self._log_locations,
            ),
        ]
        api = [
            Route(f"/rest-server/api/v2{path}", self._guarded(path, answer), methods=[verb])
            for verb, path, answer in routes
        ]
        config = uvicorn.Config(
            Starlette(routes=[*api, Route("/log-manager/{name}/{stream}", self._log)]),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            **self._tls,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )
        self._thread.start()

    def stop(self):
        """Stop listening; running jobs continue."""
        self.is_hung.set()
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)
        if self._listener is not None:
            self._listener.close()

    def close(self):
        if self._thread.is_alive():
            self.stop()
        for job in self.jobs.values():
            self._signal(job, signal.SIGKILL)
        self._folder.cleanup()

    @property
    def host(self):
        return f"127.0.0.1:{self.port}"

    # ---- for tests

    def misbehave(self, how, times: int = 1, *, at: tuple[str, str] = ("", "")):
        """Make the next `times` calls fail as `how` says: with a status, by "drop" or by "hang".

        `at` restricts the fault to calls of this verb and path. A status may have a code and a message. With "nothing", the call
        is answered normally.
        """
        self._faults.setdefault(at, deque()).extend([how] * times)

    def stop_misbehaving(self, at: tuple[str, str]):
        """Answer calls of this verb and path normally again."""
        self._faults.pop(at, None)

    def wait_for_job(self, count: int = 1) -> FakeJob:
        """Wait for `count` jobs; return the newest."""
        with self._job_was_made:
            assert self._job_was_made.wait_for(lambda: len(self.jobs) >= count, DEADLINE_S)
            return list(self.jobs.values())[-1]

    def counted(self) -> Counter:
        return Counter(self.asked)

    # ---- answers

    def _guarded(self, path, answer):
        async def guarded(request: Request) -> Response:
            self.asked.append((request.method, path))
            for at in ((request.method, path), ("", "")):
                faults = self._faults.get(at)
                if faults and (how := faults.popleft()) != "nothing":
                    return await self._fault(how)
            needs_token = path not in ("/info", "/authn/info", "/authn/basic/login")
            token = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if needs_token and token not in self.tokens:
                return _error(401, "UnauthorizedUserError", "Your token is invalid.")
            return await answer(request)

        return guarded

    async def _fault(self, how):
        if isinstance(how, tuple):
            return _error(*how)
        if isinstance(how, dict | list):
            return JSONResponse(how)
        if how == 429:
            page = "<html><body><h1>Too many requests</h1>, please try again later.</body></html>"
            return HTMLResponse(page, 429, headers={"Retry-After": "0", "X-RateLimit-Limit": "60"})
        if how == 401:
            return _error(401, "UnauthorizedUserError", "Your token is invalid.")
        if how in ("hang", "drop"):
            if how == "hang":
                await anyio.to_thread.run_sync(self.is_hung.wait, DEADLINE_S)
            # The response is shorter than its Content-Length, so the client sees a connection that is closed too early.
            return Response(b"x", headers={"Content-Length": "1000"})
        return JSONResponse({"code": "UnknownError", "message": "somewhere something failed"}, how)

    async def _info(self, request):
        return JSONResponse({"name": "PAI RESTful API", "version": "v1.8.1"})

    async def _authn_info(self, request):
        return JSONResponse({"authn_type": self.authn_type, "loginURI": "", "loginURIMethod": "post"})

    async def _log_in(self, request):
        if self.authn_type == "OIDC":
            return _error(404, "NoApiError", "API /rest-server/api/v2/authn/basic/login is not found.")
        body = await request.json()
        if body.get("username") != USER:
            return _error(400, "NoUserError", f"User {body.get('username')} is not found.")
        if body.get("password") != self.password:
            return _error(400, "IncorrectPasswordError", "Password is incorrect.")
        self.logins += 1
        token = f"token-of-login-{self.logins}"
        self.tokens.add(token)
        return JSONResponse({"user": USER, "token": token, "admin": False})

    async def _check(self, request):
        return JSONResponse({"username": USER, "application": True})

    async def _list(self, request):
        query = request.query_params
        states = query["state"].split(",") if "state" in query else None
        rows = [
            job.row()
            for job in reversed(list(self.jobs.values()))
            if not self.lists_are_late
            and query.get("keyword", "") in job.name
            and query.get("username", job.user) == job.user
            and (states is None or job.state in states)
            and ("tagsContain" not in query or set(query["tagsContain"].split(",")) & set(job.tags))
        ]
        offset, limit = int(query.get("offset", 0)), int(query.get("limit", 5000))
        return JSONResponse(rows[offset : offset + limit])

    async def _submit(self, request):
        assert request.headers["Content-Type"].startswith("text/")
        try:
            job = FakeJob((await request.body()).decode())
        except ProtocolInvalid as error:
            return _error(400, "InvalidProtocolError", error.response_message())
        if f"{USER}~{job.name}" in self.jobs:
            return _error(409, "ConflictJobError", f"Job {USER}~{job.name} already exists.")
        virtual_cluster = job.protocol.virtual_cluster
        if virtual_cluster not in self.virtual_clusters:
            return _error(404, "NoVirtualClusterError", f"Virtual cluster {virtual_cluster} is not found.")
        if virtual_cluster not in self.usable:
            message = f"User {USER} is not allowed to do operation in {virtual_cluster}"
            return _error(403, "ForbiddenUserError", message)
        with self._job_was_made:
            self.jobs[f"{USER}~{job.name}"] = job
            self._job_was_made.notify_all()
        if self.run_jobs:
            self._run(job)
        message = f"Update job {job.name} for user {USER} successfully."
        return JSONResponse({"status": 202, "message": message}, 202)

    async def _detail(self, request):
        job = self.jobs.get(request.path_params["name"])
        return _no_job(request) if job is None else JSONResponse(job.detail())

    async def _config(self, request):
        job = self.jobs.get(request.path_params["name"])
        # Like OpenPAI, the fake sends JSON text with the content type YAML.
        return (
            _no_job(request)
            if job is None
            else PlainTextResponse(json.dumps(without_secrets(job.protocol)), media_type="text/yaml")
        )

    async def _execute(self, request):
        job = self.jobs.get(request.path_params["name"])
        if job is None:
            return _no_job(request)
        if job.user != USER:
            return _error(403, "ForbiddenUserError", f"User {USER} is not allowed to do this operation.")
        job.execution_type = (await request.json())["value"]
        if job.state in _LIVE:
            job.state = "STOPPING"
            if not self._signal(job, signal.SIGTERM):
                job.end("STOPPED")
        return JSONResponse({"status": 202, "message": f"Execute job {job.name} successfully."}, 202)

    async def _tag(self, request):
        job = self.jobs.get(request.path_params["name"])
        if job is None:
            return _no_job(request)
        job.tags.append((await request.json())["value"])
        return JSONResponse({"status": 200, "message": "Add tag successfully."})

    async def _storages(self, request):
        return JSONResponse({"storages": [{"name": STORAGE, "share": True, "default": True}]})

    async def _virtual_clusters(self, request):
        if "nodes" in request.query_params:
            return JSONResponse(self.nodes)
        return JSONResponse({name: {"capacity": 50} for name in self.virtual_clusters})

    async def _user(self, request):
        if not self.shows_rights:
            return _error(404, "NoApiError", "API is not found.")
        if request.path_params["name"] != USER:
            return _error(400, "NoUserError", f"User {request.path_params['name']} is not found.")
        return JSONResponse({"username": USER, "admin": False, "virtualCluster": sorted(self.usable)})

    async def _log_locations(self, request):
        job = self.jobs.get(request.path_params["name"])
        if job is None:
            return _no_job(request)
        if job.state == "WAITING":
            return _error(404, "NoTaskLogError", "Log of task is not found.")
        names = [*job.logs, "all"]
        return JSONResponse(
            {
                "locations": [
                    {"name": name, "uri": f"/log-manager/{job.name}/{name}?token=t"} for name in names
                ]
            }
        )

    async def _log(self, request):
        self.log_calls += 1
        if self.log_server == "hangs":
            await anyio.to_thread.run_sync(self.is_hung.wait, 2 * DEADLINE_S)
        elif self.log_server == "trickles":
            return StreamingResponse(self._trickle(), media_type="text/plain")
        job = self.jobs[f"{USER}~{request.path_params['name']}"]
        stream = request.path_params["stream"]
        written = {name: text + self._written(job, name) for name, text in job.logs.items()}
        content = b"".join(written.values()) if stream == "all" else written[stream]
        since = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if since and since >= len(content):
            return PlainTextResponse("", 416)
        return Response(content[since:], 206 if since else 200, media_type="text/plain")

    def _trickle(self):
        while not self.is_hung.wait(0.2):
            yield b"x"

    # ---- jobs as processes

    def _run(self, job: FakeJob):
        roles = render(job.protocol).roles
        job.state = "RUNNING"
        shared = {
            "PAI_JOB_NAME": f"{job.user}~{job.name}",
            "PAI_USER_NAME": job.user,
            "PAI_TASK_ROLE_LIST": ",".join(each.role.name for each in roles),
            **{f"PAI_TASK_ROLE_TASK_COUNT_{each.role.name}": str(each.role.instances) for each in roles},
        }
        for each in roles:
            for index in range(each.role.instances):
                folder = Path(tempfile.mkdtemp(dir=self._folder.name))
                (folder / "user.sh").write_text(each.scripts.user)
                own = {
                    "PAI_CURRENT_TASK_ROLE_NAME": each.role.name,
                    "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": str(index),
                }
                with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
                    process = subprocess.Popen(
                        [*self.tasks_begin_with, "bash", str(folder / "user.sh")],
                        cwd=folder,
                        env=without_settings(os.environ) | shared | own,
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        start_new_session=True,
                    )
                job.processes.append(process)
                job.files.append(folder)
        threading.Thread(target=self._wait, args=(job,), daemon=True).start()

    def _wait(self, job: FakeJob):
        codes = [process.wait() for process in job.processes]
        stopped = job.execution_type == "STOP"
        code = job.ends_with or max(codes, key=abs)
        job.end("STOPPED" if stopped else "FAILED" if code else "SUCCEEDED", None if stopped else code)

    def _written(self, job: FakeJob, stream: str) -> bytes:
        return b"".join((folder / stream).read_bytes() for folder in job.files)

    def _signal(self, job: FakeJob, number: int) -> bool:
        for process in job.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        return bool(job.processes)


def _error(status, code, message):
    return JSONResponse({"code": code, "message": message}, status)


def _no_job(request):
    return _error(404, "NoJobError", f"Job {request.path_params['name']} is not found.")
