"""OpenPAI's REST API over one cluster. The paths include those of all releases that clients target.

All routes are below /api and, as through OpenPAI's gateway, below /rest-server/api. Logs are below /log-manager, and metrics
at /metrics.

Source: microsoft/pai, REST server: routes of v0.14 to v1.8.1.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from nni_manager.local_openpai import response_bodies
from nni_manager.local_openpai.access_log import AccessLog
from nni_manager.local_openpai.accounts import Accounts, Caller
from nni_manager.local_openpai.authentication import Authenticator
from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.errors import ApiError, ClusterClosed, StateBusy, invalid_parameters, no_job
from nni_manager.local_openpai.jobs import JobSummary
from nni_manager.local_openpai.listing import listed
from nni_manager.local_openpai.log_links import LogAddress, LogLinks
from nni_manager.local_openpai.logs import log_sizes
from nni_manager.local_openpai.request_bodies import BodyTooLarge, fields_of, job_text_of, text_in
from nni_manager.local_openpai.store import JobStore
from nni_manager.support.http_server import LingeringCloseMiddleware, metrics_response
from nni_manager.training_services.openpai.job_checks import ProtocolInvalid

# The reported release of the API; some clients check it.
API_VERSION = "v1.8.1"


class OpenPaiApi:
    """The routes over one cluster, which clients reach at `address`.

    `store` persists the accounts after each change; `clock` returns seconds since the epoch.
    """

    def __init__(
        self,
        cluster: Cluster,
        accounts: Accounts,
        store: Callable[[Accounts], None],
        address: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._authenticator = Authenticator(cluster, accounts, store, clock)
        self._links = LogLinks(cluster, address, clock)

    def app(self, host_names: Sequence[str], allowed_origins: Sequence[str] = ()) -> Starlette:
        """The ASGI application, which accepts only these host names ("*" is any).

        Pages of `allowed_origins` may use it from a browser. They need a token as all others do: a request never carries cookies.
        """
        v1, v2 = self._routes()
        # A client of v1 asks for this path without a slash, and a redirect would lead to the form with one.
        api = [Route("/v1", self.info), Mount("/v1", routes=v1), Mount("/v2", routes=v2)]
        return Starlette(
            routes=[
                Mount("/api", routes=api),
                Mount("/rest-server/api", routes=api),
                Route(LogLinks.PATH, self._links.read),
                Route("/metrics", self._authenticator.authenticated(self.metrics)),
            ],
            middleware=[
                Middleware(AccessLog),
                Middleware(LingeringCloseMiddleware),
                Middleware(TrustedHostMiddleware, allowed_hosts=host_names, www_redirect=False),
                Middleware(
                    CORSMiddleware,
                    allow_origins=allowed_origins,
                    allow_methods=("GET", "POST", "PUT", "DELETE"),
                    allow_headers=("Authorization", "Content-Type", "Range"),
                ),
            ],
            exception_handlers=dict.fromkeys(
                (HTTPException, BodyTooLarge, ApiError, ProtocolInvalid, StateBusy, ClusterClosed, Exception),
                _error_response,
            ),
        )

    def _routes(self) -> tuple[list[Route], list[Route]]:
        """The routes below /v1 and below /v2."""
        authenticated = self._authenticator.authenticated
        clusters = [
            Route("/virtual-clusters", authenticated(self.virtual_clusters)),
            Route("/virtual-clusters/{name}", authenticated(self.virtual_cluster)),
            Route("/virtual-clusters/{name}/nodes", authenticated(self.nodes)),
            Route("/virtual-clusters/{name}/sku-types", authenticated(self.sku_types_of)),
            Route("/storages", authenticated(self.storages)),
            Route("/storages/{name}", authenticated(self.storage)),
            Route("/cluster/sku-types", authenticated(self.sku_types)),
            Route("/kubernetes/nodes", authenticated(self.kubernetes_nodes)),
            Route("/kubernetes/pods", authenticated(self.kubernetes_pods)),
            Route("/alerts", authenticated(self.alerts)),
        ]

        def one_job(path: str) -> list[Route]:
            return [
                Route(path, authenticated(self.job)),
                Route(path + "/config", authenticated(self.config)),
                Route(path + "/ssh", authenticated(self.ssh)),
                Route(path + "/executionType", authenticated(self.execute), methods=["PUT"]),
            ]

        v1 = [
            Route("/", self.info),
            Route("/token", self._authenticator.log_in, methods=["POST"]),
            Route("/authn/basic/login", self._authenticator.log_in, methods=["POST"]),
            Route("/jobs", authenticated(self.jobs)),
            Route("/user/{user}", authenticated(self._authenticator.user)),
            Route("/user/{user}/jobs", authenticated(self.jobs)),
            *one_job("/user/{user}/jobs/{job}"),
            *clusters,
        ]
        job = "/jobs/{framework}"
        task = job + "/attempts/{attempt:int}/taskRoles/{role}/taskIndex/{index:int}/attempts"
        v2 = [
            Route("/info", self.info),
            *self._authenticator.routes(),
            Route("/jobs", authenticated(self.jobs)),
            Route("/jobs", authenticated(self.submit), methods=["POST"]),
            *one_job(job),
            Route(job, authenticated(self.delete_job), methods=["DELETE"]),
            Route(job + "/tag", authenticated(self.add_tag), methods=["PUT"]),
            Route(job + "/tag", authenticated(self.remove_tag), methods=["DELETE"]),
            Route(job + "/events", authenticated(self.events)),
            Route(job + "/attempts/{attempt:int}", authenticated(self.job)),
            Route(job + "/job-attempts", authenticated(self.job_attempts)),
            Route(job + "/job-attempts/healthz", authenticated(self.job_attempts_health)),
            Route(job + "/job-attempts/{attempt:int}", authenticated(self.job_attempt)),
            Route(task, authenticated(self.task_attempts)),
            Route(task + "/{task_attempt:int}/logs", authenticated(self.logs)),
            # The path of a job's configuration in OpenPAI's first releases with the v2 API.
            Route("/user/{user}/jobs/{job}/config", authenticated(self.config)),
            *clusters,
        ]
        return v1, v2

    async def info(self, _: Request) -> Response:
        """The name and version of the API; no login required."""
        return JSONResponse(
            {
                "name": "PAI RESTful API",
                "version": API_VERSION,
                "launcherType": "k8s",
                "authnMethod": "basic",
            }
        )

    # ---- jobs

    async def jobs(self, request: Request, _: Caller) -> Response:
        """The jobs that match a query."""
        query = dict(request.query_params)
        if "user" in request.path_params:
            query["username"] = request.path_params["user"]
        jobs = await self._cluster.read(JobStore.jobs)
        return JSONResponse(listed(query, map(response_bodies.list_item, jobs)))

    async def submit(self, request: Request, caller: Caller) -> Response:
        """Submit a job; it is queued."""
        text = await job_text_of(request)
        name = await self._cluster.submit(caller.name, text)
        return _done(202, f"Update job {name} for user {caller.name} successfully.")

    async def job(self, request: Request, _: Caller) -> Response:
        """One job, with its newest attempt or with the requested one."""
        attempt_id = request.path_params.get("attempt")
        found = await self._cluster.read(JobStore.detail, *_job_of(request), attempt_id)
        return JSONResponse(response_bodies.detail(found))

    async def job_attempts(self, request: Request, _: Caller) -> Response:
        """All attempts of a job, the newest first."""
        job = await self._job_in(request)
        found = [await self._job_attempt(job, index) for index in range(job.attempt_id, -1, -1)]
        return JSONResponse(found)

    async def job_attempts_health(self, request: Request, _: Caller) -> Response:
        """An empty answer: the history of each job is complete."""
        await self._job_in(request)
        return Response()

    async def job_attempt(self, request: Request, _: Caller) -> Response:
        """One attempt of a job."""
        return JSONResponse(
            await self._job_attempt(await self._job_in(request), request.path_params["attempt"])
        )

    async def _job_attempt(self, job: JobSummary, index: int) -> response_bodies.Document:
        # Just after the submission the newest attempt is not stored yet.
        wanted = None if index == job.attempt_id else index
        found = await self._cluster.read(JobStore.detail, job.user, job.name, wanted)
        return response_bodies.job_attempt(found, index)

    async def delete_job(self, request: Request, caller: Caller) -> Response:
        """Delete a terminal job."""
        job = await self._changeable(request, caller)
        await self._cluster.delete(job)
        return _done(200, f"Delete job {job.framework_name} successfully.")

    async def _job_in(self, request: Request) -> JobSummary:
        return await self._cluster.read(JobStore.summary, *_job_of(request))

    async def _changeable(self, request: Request, caller: Caller) -> JobSummary:
        """The job in the path, if the caller may change it."""
        job = await self._job_in(request)
        if not caller.may_change(job.user):
            message = f"User {caller.name} is not allowed to execute job {job.framework_name}."
            raise ApiError("ForbiddenUserError", message)
        return job

    async def config(self, request: Request, _: Caller) -> Response:
        """A job's text as submitted, without its secrets."""
        text = await self._cluster.read(JobStore.config, *_job_of(request))
        return Response(text, media_type="text/yaml")

    async def ssh(self, request: Request, _: Caller) -> Response:
        """Fail with NoJobSshInfoError: jobs of this cluster have no ssh."""
        job = await self._job_in(request)
        raise ApiError("NoJobSshInfoError", f"SSH info of job {job.framework_name} is not found.")

    async def execute(self, request: Request, caller: Caller) -> Response:
        """Stop a job."""
        value = (await fields_of(request)).get("value")
        if value not in ("START", "STOP"):
            raise invalid_parameters(
                'cannot use the request body: send {"value": "STOP"} or {"value": "START"}'
            )
        job = await self._changeable(request, caller)
        # START has no effect, neither on an active job nor on a stopped one.
        if value == "STOP":
            await self._cluster.stop(job)
        return _done(202, f"Execute job {job.framework_name} successfully.")

    async def add_tag(self, request: Request, caller: Caller) -> Response:
        """Add a tag to a job."""
        tag = await _tag_of(request)
        job = await self._changeable(request, caller)
        await self._cluster.write(JobStore.commit, [("add_tag", {"job_id": job.job_id, "tag": tag})])
        return _done(200, f"Add tag {tag} for job {job.framework_name} successfully.")

    async def remove_tag(self, request: Request, caller: Caller) -> Response:
        """Remove a tag from a job."""
        tag = await _tag_of(request)
        job = await self._changeable(request, caller)
        if not await self._cluster.write(JobStore.remove_tag, job.job_id, tag):
            known = ", ".join(each for each in job.tags if each != tag) or "none"
            message = f"cannot remove tag {tag!r}; the tags of job {job.framework_name} are: {known}"
            raise ApiError("NoTagError", message)
        return _done(200, f"Delete tag {tag} from job {job.framework_name} successfully.")

    async def events(self, request: Request, _: Caller) -> Response:
        """The events of a job."""
        wanted = request.query_params.get("type")
        if wanted not in (None, "Normal", "Warning"):
            raise invalid_parameters(f"cannot use type={wanted[:60]}; use Normal or Warning")
        job = await self._job_in(request)
        events = await self._cluster.read(JobStore.events, job.user, job.name, wanted)
        return JSONResponse(
            {"totalCount": len(events), "data": [response_bodies.event(each, job) for each in events]}
        )

    async def task_attempts(self, request: Request, _: Caller) -> Response:
        """A task with all its attempts."""
        at = request.path_params
        task = (at["attempt"], at["role"], at["index"])
        job = await self._job_in(request)
        attempts = await self._cluster.read(JobStore.task_attempts, job.user, job.name, *task)
        return JSONResponse(response_bodies.task_history(job, at["attempt"], at["role"], attempts))

    # ---- logs

    async def logs(self, request: Request, _: Caller) -> Response:
        """Links to the logs of a task's attempt."""
        at = request.path_params
        task = (*_job_of(request), at["attempt"], at["role"], at["index"], at["task_attempt"])
        names = await asyncio.to_thread(log_sizes, await self._cluster.logs_of(*task))
        # The server reads `tail-mode`; its description and its JavaScript SDK have `tailMode`.
        is_tail = "true" in (request.query_params.get(name) for name in ("tail-mode", "tailMode"))
        links = [{"name": name, "uri": self._links.link(LogAddress(*task, name), is_tail)} for name in names]
        return JSONResponse({"locations": links})

    # ---- resources of the cluster

    async def metrics(self, request: Request, _: Caller) -> Response:
        """The metrics of the cluster and of this process. OpenPAI's own exporters have other names."""
        from nni_manager.local_openpai.metrics import ClusterCollector  # only a scraped service pays for it

        jobs = await self._cluster.read(JobStore.jobs)
        return metrics_response(ClusterCollector(jobs, self._cluster.virtual_clusters), request)

    async def virtual_clusters(self, request: Request, _: Caller) -> Response:
        """All virtual clusters; with `?nodes`, this machine as the only node instead."""
        clusters = self._cluster.virtual_clusters
        if "nodes" in request.query_params:
            return JSONResponse(response_bodies.node(clusters))
        return JSONResponse(response_bodies.virtual_clusters(clusters))

    async def virtual_cluster(self, request: Request, _: Caller) -> Response:
        """One virtual cluster."""
        name = request.path_params["name"]
        clusters = response_bodies.virtual_clusters(self._cluster.virtual_clusters)
        if name not in clusters:
            raise ApiError("NoVirtualClusterError", f"Virtual cluster {name} is not found.")
        return JSONResponse(clusters[name])

    async def nodes(self, request: Request, caller: Caller) -> Response:
        """The nodes of a virtual cluster: only this machine."""
        await self.virtual_cluster(request, caller)
        return JSONResponse([response_bodies.NODE_NAME])

    async def sku_types(self, _: Request, __: Caller) -> Response:
        """The types of machines of the HiveD scheduler: none."""
        return JSONResponse({})

    async def sku_types_of(self, request: Request, caller: Caller) -> Response:
        """The same of one virtual cluster, where earlier releases of OpenPAI have it."""
        await self.virtual_cluster(request, caller)
        return await self.sku_types(request, caller)

    async def alerts(self, _: Request, __: Caller) -> Response:
        """The active alerts: none."""
        return JSONResponse([])

    async def kubernetes_nodes(self, _: Request, caller: Caller) -> Response:
        """This machine in the form of Kubernetes, for administrators."""
        caller.must_be_admin()
        nodes = [response_bodies.kubernetes_node(self._cluster.virtual_clusters)]
        return JSONResponse(response_bodies.kubernetes_list("Node", nodes))

    async def kubernetes_pods(self, request: Request, caller: Caller) -> Response:
        """The tasks of all jobs that have not ended, in the form of Kubernetes, for administrators."""
        caller.must_be_admin()
        is_elsewhere = request.query_params.get("namespace", "default") != "default"
        jobs = [] if is_elsewhere else await self._cluster.read(JobStore.jobs)
        running = [job for job in jobs if job.completed_at_s is None]
        details = [await self._cluster.read(JobStore.detail, job.user, job.name) for job in running]
        pods = [pod for found in details for pod in response_bodies.kubernetes_pods(found)]
        return JSONResponse(response_bodies.kubernetes_list("Pod", pods))

    async def storages(self, request: Request, _: Caller) -> Response:
        """All storages, or only the default ones."""
        only_default = request.query_params.get("default") == "true"
        found = [each for each in self._cluster.settings.storages if each.is_default or not only_default]
        return JSONResponse({"storages": [response_bodies.storage(each) for each in found]})

    async def storage(self, request: Request, _: Caller) -> Response:
        """One storage."""
        name = request.path_params["name"]
        for each in self._cluster.settings.storages:
            if each.name == name:
                is_mounted = self._cluster.mounts_work
                return JSONResponse(response_bodies.storage_detail(each, is_mounted=is_mounted))
        raise ApiError("NoStorageError", f"Storage {name} is not found.")


# ---- decoding of requests


def _job_of(request: Request) -> tuple[str, str]:
    """Owner and name of the job in the path: two segments in old releases, else `user~job`."""
    at = request.path_params
    if "framework" not in at:
        return at["user"], at["job"]
    owner, tilde, name = at["framework"].partition("~")
    if not tilde:
        raise no_job(at["framework"])
    return owner, name


async def _tag_of(request: Request) -> str:
    tag = text_in(await fields_of(request), "value")
    if not re.fullmatch(r"[^,\s](?:[^,\n]{0,62}[^,\s])?", tag):
        raise invalid_parameters(f"cannot use the tag {tag[:64]!r}: use 1 to 64 characters without a comma")
    return tag


def _done(status: int, message: str) -> Response:
    return JSONResponse({"status": status, "message": message}, status_code=status)


# ---- errors


async def _error_response(request: Request, error: Exception) -> Response:
    match error:
        case BodyTooLarge():
            return JSONResponse({"message": str(error)}, status_code=413)
        case ApiError():
            refused = error
        case HTTPException():
            refused = ApiError("NoApiError", f"{request.method} {request.url.path} is not found.")
        case ProtocolInvalid():
            refused = ApiError("InvalidProtocolError", error.response_message())
        case StateBusy() | ClusterClosed():
            refused = ApiError("BusyError", str(error))
        case _:
            message = (
                "cannot handle the request: bug in the local OpenPAI; see service.log, and report the bug"
            )
            refused = ApiError("UnknownError", message)
    headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
    if refused.status in (429, 503):
        headers["Retry-After"] = "1"
    body = {"code": refused.code, "message": str(refused)}
    return JSONResponse(body, status_code=refused.status, headers=headers)
