"""Client of OpenPAI's REST API, version 2: submits jobs, reads their states, logs and descriptions.

Source: microsoft/pai v1.8.1, src/rest-server (routes, limits) and docs of its REST API.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import Enum
from typing import Any
from urllib.parse import quote

import requests

from nni_manager.training_services.errors import ClusterUnavailable
from nni_manager.training_services.openpai import connection
from nni_manager.training_services.openpai.export import dumped
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from trial_keeper.frozen_dataclass import dataclass

# Source: the default limit of OpenPAI's job list. It also accepts explicit limits up to 50000.
PAGE_ROWS = 5000
PREEMPTED = -1003
"""OpenPAI's exit code of a job whose place a critical pod has taken. Source: k8s-job-exit-spec.yaml."""
_LOG_CHUNK_BYTES = 4096
# A log server without tail-mode sends the whole log.
_MAX_LOG_BYTES = 2**20


class PaiJobState(Enum):
    """OpenPAI's job states. UNKNOWN is both OpenPAI's own and ours for states of other versions.

    Source: microsoft/pai v1.8.1, src/rest-server/src/models/v2/job/k8s.js (convertState).
    """

    WAITING = "WAITING"  # accepted, or in the queue
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"

    @classmethod
    def of(cls, value: object) -> PaiJobState:
        """Returns the state with this value."""
        return cls(value) if value in cls._value2member_map_ else cls.UNKNOWN

    @property
    def is_terminal(self) -> bool:
        """True if the job has ended. UNKNOWN is not terminal, because a later poll shows a known state."""
        return self in (PaiJobState.SUCCEEDED, PaiJobState.STOPPED, PaiJobState.FAILED)


OUT_OF_MEMORY = -1200
"""The exit code of a container that was killed for lack of memory (UserContainerDockerOOMKilled)."""
LIVE = (PaiJobState.WAITING, PaiJobState.RUNNING, PaiJobState.STOPPING)
"""The states that select live jobs in a list request."""


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """A task of a job. `attempt` is the number of its latest attempt, from 0; `document` is OpenPAI's own."""

    role: str
    index: int
    attempt: int
    document: Mapping[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        """As nnictl and the logs name the task, such as worker-1."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The details of one job, or its row in a list, which has neither attempt nor reason. `document` is OpenPAI's own.

    `exit_code` is that of the task's command if the runtime reports it, else OpenPAI's. `trigger` is the task that ended the job.
    `is_preempted`: OpenPAI reports that a critical pod took the job's place.
    """

    name: str
    user: str
    state: PaiJobState
    attempt: int
    exit_code: int | None
    reason: str
    trigger: tuple[str, int] | None
    document: Mapping[str, Any] = field(repr=False)
    is_preempted: bool = False

    @property
    def tasks(self) -> list[TaskStatus]:
        """The tasks of the latest attempt; empty before OpenPAI has created any."""
        return [
            TaskStatus(role, int(task.get("taskIndex") or 0), int(task.get("attemptId") or 0), task)
            for role, value in (self.document.get("taskRoles") or {}).items()
            for task in value.get("taskStatuses") or []
        ]


@dataclass(frozen=True, slots=True)
class NodeResources:
    """The total resources of a node. None: not reported by OpenPAI."""

    gpu: int | None
    cpu: int | None
    memory_mb: int | None


class OpenPai(connection.PaiConnection):
    """Client of one cluster for one user. Errors: as `PaiConnection`. A job's name may be `user~job`."""

    def submit(self, text: str) -> None:
        """Submit a job as YAML. On return OpenPAI has stored it; its lists show the job some seconds later.

        Raises:
            JobAlreadyExists, JobRefused: permanent; submitting again does not help.
            RequestRejected: the answer is not OpenPAI's answer to a job, e.g. a gateway's error page.
            QuotaExceeded, Unauthenticated, ClusterUnavailable: a later submit may succeed.
        """
        headers = {"Content-Type": "text/yaml"}
        try:
            self._ask("POST", "/jobs", "submit the job", data=text.encode(), headers=headers)
        except connection.JobAlreadyExists as error:
            # An earlier try whose answer was lost has succeeded: no other process uses this name.
            if not error.may_be_ours:
                raise

    def jobs(
        self,
        *,
        keyword: str = "",
        states: Iterable[PaiJobState] = (),
        tags: Iterable[str] = (),
        user: str | None = "",
    ) -> list[JobStatus]:
        """Returns the jobs whose name contains `keyword`, newest first.

        `states` and `tags`: a job must have one of them; empty means any. `user`: the owner; empty means this client's user, None
        means all users.
        """
        filters = {
            "username": None if user is None else user or self.user,
            "keyword": keyword,
            "state": ",".join(state.value for state in states),
            "tagsContain": ",".join(tags),
        }
        query = {"order": "submissionTime,DESC", "limit": str(PAGE_ROWS)}
        query |= {name: value for name, value in filters.items() if value}
        rows: dict[tuple[str, str], JobStatus] = {}
        while True:
            answer = self._ask("GET", "/jobs", "list jobs", params={**query, "offset": str(len(rows))})
            page = answer.get("data") if isinstance(answer, dict) else answer
            if not isinstance(page, list):
                # An empty list would mean that no job exists.
                raise self._not_of_openpai("list jobs", "no list of jobs")
            before = len(rows)
            for document in page:
                row = self._status("list jobs", document)
                rows.setdefault((row.user, row.name), row)
            # Jobs submitted during the listing shift others to the next page, so rows may repeat.
            if len(page) < PAGE_ROWS or len(rows) == before:
                return list(rows.values())

    def job(self, name: str) -> JobStatus:
        """Returns one job."""
        answer = self._ask("GET", self._path(name), f"find job {name}")
        if not (isinstance(answer, dict) and isinstance(answer.get("jobStatus"), dict)):
            raise self._not_of_openpai(f"find job {name}", "no state of the job")
        return self._status(f"find job {name}", answer)

    def _status(self, what: str, document: Any) -> JobStatus:
        try:
            return _status(document)
        except (TypeError, ValueError, AttributeError) as error:
            raise self._not_of_openpai(what, "a job state of another form") from error

    def _not_of_openpai(self, what: str, has: str) -> connection.RequestRejected:
        return connection.RequestRejected(
            f"cannot {what}: the answer of {self.address} has {has}; check that OpenPAI runs there, or correct paiConfig.host"
        )

    def stop(self, name: str) -> None:
        """Request the end of a job. A terminal job is left as it is."""
        self._ask("PUT", f"{self._path(name)}/executionType", f"stop job {name}", json={"value": "STOP"})

    def tag(self, name: str, tag: str) -> None:
        """Add a tag to a job; idempotent. A tag must not contain a comma."""
        self._ask("PUT", f"{self._path(name)}/tag", f"tag job {name}", json={"value": tag})

    def config(self, name: str) -> str:
        """Returns the job as YAML with masked secrets."""
        text = self._send("GET", f"{self._api}{self._path(name)}/config", f"read job {name}").text
        try:
            document = json.loads(text)
        except ValueError:
            return text
        return document if isinstance(document, str) else dumped(document)

    def events(self, name: str, kind: str | None = None) -> list[dict[str, Any]]:
        """Returns the events of a job, the oldest first; only those of type `kind` (Normal or Warning) if given.

        None of a job on a cluster before OpenPAI 1.3.
        """
        query = None if kind is None else {"type": kind}
        try:
            found = self._ask_mapping(
                f"{self._path(name)}/events", f"read the events of job {name}", params=query
            )
        except connection.RequestRejected:
            return []
        return [each for each in found.get("data", []) if isinstance(each, dict)]

    def log_locations(self, job: JobStatus, task: TaskStatus, *, is_tail: bool = False) -> dict[str, str]:
        """Returns the address of each log of a task, by log name (stdout, stderr, all, stdout.1, …).

        Addresses expire after two minutes. `is_tail`: of the last 16 kB of each log. A log that does not exist, or not yet, is
        `JobNotOnCluster`.
        """
        name = f"{job.user}~{job.name}" if job.user else job.name
        path = (
            f"{self._path(name)}/attempts/{job.attempt}/taskRoles/{quote(task.role, safe='')}/taskIndex/{task.index}"
            f"/attempts/{task.attempt}/logs"
        )
        query = {"tail-mode": "true"} if is_tail else None
        answer = self._ask_mapping(path, f"find the logs of {task.name} of job {job.name}", params=query)
        locations = answer.get("locations", [])
        return {str(each["name"]): str(each["uri"]) for each in locations if "name" in each and "uri" in each}

    def log(self, location: str, since: int = 0) -> bytes:
        """Returns the bytes of a log from offset `since`; empty at the end. `location` is a value of `log_locations`.

        A log that no longer exists is `JobNotOnCluster`, as for `log_tail`.
        """
        answer = self._get_log(location, headers={"Range": f"bytes={since}-"} if since else None)
        match answer.status_code:
            case requests.codes.requested_range_not_satisfiable:
                return b""
            case requests.codes.partial:
                return answer.content
        return answer.content[since:]

    def log_tail(self, location: str, most_bytes: int, deadline_s: float) -> bytes:
        """Returns at most the last `most_bytes` of what the log's first MiB yields until `deadline_s` (monotonic clock)."""
        text = bytearray()
        with contextlib.closing(self._get_log(location, stream=True)) as answer:
            try:
                for chunk in answer.iter_content(_LOG_CHUNK_BYTES):
                    text += chunk
                    if len(text) >= _MAX_LOG_BYTES or time.monotonic() >= deadline_s:
                        break
            except requests.RequestException as error:
                raise ClusterUnavailable(
                    f"cannot read the log: {connection.why_no_answer(error)}; open the job's page instead"
                ) from error
        return bytes(text[-most_bytes:])

    def within(self, retry_policy: ClientRetryPolicy) -> OpenPai:
        """Returns a client of the same cluster and login with another retry policy."""
        other = copy.copy(self)
        other._retry_policy = retry_policy
        return other

    # ---- the cluster

    def user_of_token(self) -> str | None:
        """Returns the user that the token belongs to; None if this OpenPAI does not report it."""
        try:
            name = self._ask_mapping("/tokens/check", "check the token").get("username")
        except connection.RequestRejected:  # older releases lack this route
            return None
        return name if isinstance(name, str) else None

    def storages(self) -> list[str]:
        """Returns the names of the storages that this user may mount."""
        found = self._ask_mapping("/storages", "list storages").get("storages", [])
        return [str(each["name"]) for each in found if "name" in each]

    def virtual_clusters(self) -> list[str]:
        """Returns the names of all virtual clusters."""
        return list(self._ask_mapping("/virtual-clusters", "list virtual clusters"))

    def virtual_clusters_of_user(self) -> list[str] | None:
        """Returns the names of the virtual clusters that this user may submit to.

        None if this OpenPAI does not report them, or for an administrator, who may use all.
        """
        path = f"/users/{quote(self.user, safe='')}"
        try:
            answer = self._ask_mapping(path, f"read what {self.user} may use")
        except (connection.JobRefused, connection.RequestRejected):
            return None  # older releases lack this route, and some restrict it to administrators
        names = None if answer.get("admin") is True else answer.get("virtualCluster")
        return [str(name) for name in names] if isinstance(names, list) else None

    def nodes(self) -> list[NodeResources]:
        """Returns the total resources of each node; empty if this OpenPAI does not report them."""
        try:
            documents = self._ask_mapping("/virtual-clusters", "list nodes", params={"nodes": ""}).values()
        except (connection.JobRefused, connection.RequestRejected):
            return []
        return [_node(document) for document in documents if isinstance(document, dict)]

    def _path(self, name: str) -> str:
        whole = name if "~" in name else f"{self.user}~{name}"
        return f"/jobs/{quote(whole, safe='~')}"

    def _ask_mapping(self, path: str, what: str, **options: Any) -> dict[str, Any]:
        """Returns the answer to a GET; empty if it is not a mapping."""
        answer = self._ask("GET", path, what, **options)
        return answer if isinstance(answer, dict) else {}

    def _get_log(self, location: str, **options: Any) -> requests.Response:
        is_own = location.startswith(("/", f"{self.address}/"))
        url = f"{self.address}{location}" if location.startswith("/") else location
        return self._send("GET", url, "read the log", with_token=is_own, **options)


def _node(document: Mapping[str, Any]) -> NodeResources:
    """Source: microsoft/pai v1.8.1, models/v2/virtual-cluster (`gpuTotal`). The local OpenPAI reports `total` instead."""
    total = document.get("total")
    counts = total if isinstance(total, dict) else {"gpu": document.get("gpuTotal")}
    gpu, cpu, memory_mb = (counts.get(key) for key in ("gpu", "cpu", "memory"))
    return NodeResources(*(each if isinstance(each, int) else None for each in (gpu, cpu, memory_mb)))


def _status(document: Any) -> JobStatus:
    values = document if isinstance(document, dict) else {}
    status = values.get("jobStatus") or values  # a row of a list is flat
    messages = status.get("appExitMessages") or {}
    runtime = messages.get("runtime") if isinstance(messages, dict) else None
    origin = runtime.get("originUserExitCode") if isinstance(runtime, dict) else None
    role, index = status.get("appExitTriggerTaskRoleName"), status.get("appExitTriggerTaskIndex")
    code = status.get("appExitCode")
    reason = (
        str((status.get("appExitSpec") or {}).get("phrase", "")),
        "" if code is None else f"code {code}",
        str(status.get("appExitTriggerMessage") or ""),
    )
    return JobStatus(
        name=str(values.get("name", "")),
        user=str(status.get("username", "")),
        state=PaiJobState.of(status.get("state")),
        attempt=int(status.get("attemptId") or 0),
        exit_code=origin if isinstance(origin, int) else code,
        reason=", ".join(filter(None, reason)),
        trigger=(role, index) if isinstance(role, str) and isinstance(index, int) else None,
        document=values,
        is_preempted=code == PREEMPTED,
    )
