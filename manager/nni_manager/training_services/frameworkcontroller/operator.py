"""FrameworkController as an `Operator`. Pure: the same input gives the same document.

Pods of multi-task jobs start with FrameworkController's barrier. The barrier waits until all tasks have an address, and
writes the addresses to a script for the commands.

A user's own Framework is a template: it keeps its roles, images, volumes, resources and other pod fields. The job's name and
labels and the shared storage are added; the keeper, with its variables, replaces each role's command. Unset fields are set
where the default of Kubernetes or FrameworkController does not suit a trial.

Source: FrameworkController v1 (Framework, FrameworkBarrier, FrameworkState, CompletionStatus and its predefined completion
codes); NNI v2.10 for names, ports and variables. Unlike NNI, a failed task is not restarted in its pod, and single-task jobs
have no barrier.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.training_services.kubernetes import render
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import SUCCESS, JobOutcome, Operator, Stage
from nni_manager.training_services.kubernetes.pod_template import with_labels, with_variables
from nni_manager.training_services.kubernetes.pods import init_failure_text, is_terminal, reason_and_message
from nni_manager.training_services.kubernetes.resources import Resource
from nni_manager.training_services.kubernetes.section import MOUNT, VOLUME, RoleConfig
from trial_keeper.settings import PREFIX, KeeperSettings
from trial_keeper.wire.reasons import ExitReason

FRAMEWORKS = Resource(
    "frameworkcontroller.microsoft.com", "v1", "frameworks", "Framework", operator="FrameworkController"
)
CONTAINER = "framework"
_BARRIER = "frameworkbarrier"
_BARRIER_VOLUME = "frameworkbarrier-volume"
_BARRIER_PATH = "/mnt/frameworkbarrier"
_BARRIER_IMAGE = "frameworkcontroller/frameworkbarrier"
_FIRST_PORT = 4000
# A node that does not end a pod within ten minutes counts as lost. No task can run twice: tasks are never retried.
_NODE_LOST_S = 600
_NO_RETRIES = {"fancyRetryPolicy": False, "maxRetryCount": 0}
# FrameworkController's codes for pods or jobs that were deleted externally.
_PREEMPTED = -1003
"""PodPreemptedForCriticalPod."""
_TRANSIENT = frozenset({200, 201})
"""Exit codes of containers whose failure a retry may resolve, such as the barrier's timeout."""
_DELETED_EXTERNALLY = frozenset({-100, -101, -210, -220, -230})
# Exports the role's command, exactly as Kubernetes expands it, as a line of bash.
_EXPORTS_COMMAND = f"""export {PREFIX}COMMAND="$(printf '%q ' "$@")\""""
STAGES = {
    "AttemptCreationPending": Stage.WAITING,
    "AttemptCreationRequested": Stage.WAITING,
    "AttemptPreparing": Stage.WAITING,
    "AttemptRunning": Stage.RUNNING,
    "AttemptDeletionPending": Stage.RUNNING,
    "AttemptDeletionRequested": Stage.RUNNING,
    "AttemptDeleting": Stage.RUNNING,
    "AttemptCompleted": Stage.RUNNING,  # another attempt may follow
    "Completed": Stage.ENDED,
}
"""The stage of a job by its Framework's state."""


class FrameworkController(Operator):
    """The operator whose resources are Frameworks."""

    title = "FrameworkController"
    resource = FRAMEWORKS

    @property
    def completion(self) -> Completion:
        """Based on the roles' completion policies."""
        return Completion(
            tuple(
                TaskRole(role.name, role.tasks, _count(role.min_failed), _count(role.min_succeeded))
                for role in self.config.roles
            )
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warns that the barrier must be allowed to read the Framework."""
        if not self._waits_at_barrier or self.config.service_account is not None:
            return ()
        template = self._template
        if template and all(
            "serviceAccountName" in role["task"]["pod"]["spec"] for role in template["spec"]["taskRoles"]
        ):
            return ()
        return (
            "tasks of one job wait for each other at FrameworkController's barrier, which reads the Framework; if "
            "pods may not read Frameworks on this cluster, set serviceAccountName to an account that may",
        )

    def name_of(self, experiment_id: str, job_id: str) -> str:
        """Lower-case letters and digits, so names of two jobs may collide."""
        # A restarted trial's job has a suffix, as in `aB3dE-1`.
        return f"nniexp{experiment_id}{render.short_name(job_id).replace('-', '')}".lower()

    def metadata(self, labels: dict[str, str]) -> Document:
        """The labels, and those and the annotations of the template."""
        return with_labels(self._template.get("metadata"), labels)

    def spec(self, name: str, settings: KeeperSettings, labels: dict[str, str]) -> Document:
        """The template with a keeper in each pod, or one made from the roles."""
        template: Document = self._template.get("spec") or {}
        given = template.get("taskRoles") or [{"task": {"pod": {}}} for _ in self.config.roles]
        roles = [
            {
                "name": role.name,
                "taskNumber": role.tasks,
                "frameworkAttemptCompletionPolicy": {
                    "minFailedTaskCount": _count(role.min_failed),
                    "minSucceededTaskCount": _count(role.min_succeeded),
                },
                "task": {
                    "retryPolicy": _NO_RETRIES,
                    "podGracefulDeletionTimeoutSec": _NODE_LOST_S,
                    **own["task"],
                    "pod": {
                        "metadata": with_labels(own["task"]["pod"].get("metadata"), labels),
                        "spec": self._pod(role, name, settings, own["task"]["pod"].get("spec")),
                    },
                },
            }
            for role, own in zip(self.config.roles, given, strict=True)
        ]
        return {"executionType": "Start", "retryPolicy": _NO_RETRIES, **template, "taskRoles": roles}

    def stage_of(self, document: Document) -> Stage:
        """WAITING without a state, or in one of another version: a later event shows a known state."""
        return STAGES.get((document.get("status") or {}).get("state", ""), Stage.WAITING)

    def unreported_pod(self, document: Document) -> Document:
        """The pod of the first role. FrameworkController retries a refused pod without a report."""
        role = document["spec"]["taskRoles"][0]
        pod = role["task"]["pod"]
        name = f"{document['metadata']['name']}-{role['name']}-0"
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            **pod,
            "metadata": {**(pod.get("metadata") or {}), "name": name},
        }

    def pod_uids_of(self, document: Document) -> Mapping[str, str]:
        """The pods of all tasks. FrameworkController deletes them when the job ends, and its status names only their uids."""
        attempt = (document.get("status") or {}).get("attemptStatus") or {}
        of_tasks = (task.get("attemptStatus") or {} for task in _tasks(attempt))
        return {
            each["podName"]: each["podUID"] for each in of_tasks if each.get("podName") and each.get("podUID")
        }

    def verdict_of(self, document: Document, pods: Mapping[str, Document]) -> JobOutcome:
        """The outcome of the Framework's deciding task."""
        attempt = document["status"].get("attemptStatus") or {}
        completion = attempt.get("completionStatus") or {}
        if (completion.get("type") or {}).get("name") == "Succeeded":
            return SUCCESS
        code = int(completion.get("code") or 0)
        task = _deciding_task(attempt, completion.get("trigger") or {})
        ended = (task.get("completionStatus") or {}).get("pod") or {}
        failed = [each for each in ended.get("containers") or [] if each.get("code")]
        name = document["metadata"]["name"]
        because = (
            (completion.get("trigger") or {}).get("message")
            or completion.get("diagnostics")
            or "no reason given"
        )
        message = f"FrameworkController reports {name}: {completion.get('phrase') or 'failed'}, code {code}; {because}"
        if pod_message := reason_and_message(ended):
            message += f"\nKubernetes reports for its pod: {pod_message}"
        reason = ExitReason.JOB_LOST if code in _DELETED_EXTERNALLY else ExitReason.KEEPER_LOST
        exit_code, cause, pod = None, "", task.get("podName")
        if failed and failed[-1].get("name") in _init_containers(document):
            # Its exit code is not that of a keeper.
            of_init = (failed[-1]["name"], int(failed[-1]["code"]), failed[-1].get("reason"))
            if reason is ExitReason.KEEPER_LOST and not ended.get("reason"):
                cause = f"pod {pod} failed: {init_failure_text(*of_init)}"
                reason = reason if of_init[1] in _TRANSIENT else ExitReason.COULD_NOT_START
        elif failed:
            exit_code = int(failed[-1]["code"])
            if failed[-1].get("reason") == "OOMKilled":
                reason = ExitReason.OUT_OF_MEMORY
        if code == _PREEMPTED:
            exit_code, reason = None, ExitReason.PREEMPTED
        awaits_pod = pod is not None and not is_terminal(pods.get(pod, {}))
        return JobOutcome(exit_code, message, reason, pod, awaits_pod, cause)

    @property
    def _template(self) -> Document:
        """The user's own Framework; empty if the experiment has none."""
        found: Document = json.loads(self.config.template_text or "{}")
        return found

    @property
    def _waits_at_barrier(self) -> bool:
        """True if the tasks of a job wait for each other."""
        return self.completion.tasks > 1

    def _pod(self, role: RoleConfig, name: str, settings: KeeperSettings, given: Document | None) -> Document:
        """Returns the pod of a role; `given` is the template's pod spec, or None."""
        own = [each.get("name") for each in (given or {}).get("initContainers") or ()]
        has_barrier = self._waits_at_barrier and _BARRIER not in own  # else it is the template's own
        ports = {each.name: port for port, each in enumerate(self.config.roles, _FIRST_PORT)}
        environ = {f"FB_{role_name.upper()}_PORT": f"{port}" for role_name, port in ports.items()}
        before = (f". {_BARRIER_PATH}/injector.sh",) if has_barrier else ()
        if given is None:
            job, port = (self.config, role, name, settings), ports[role.name]
            spec = render.pod_spec(*job, container=CONTAINER, environ=environ, port=port, before=before)
        else:
            spec = self._with_keeper(given, role, name, settings, environ, before)
        if has_barrier:
            barrier = {"name": _BARRIER_VOLUME, "mountPath": _BARRIER_PATH}
            spec["volumes"].append({"name": _BARRIER_VOLUME, "emptyDir": {}})
            spec["containers"][0]["volumeMounts"].append(barrier)
            spec["initContainers"] = [
                {"name": _BARRIER, "image": _BARRIER_IMAGE, "volumeMounts": [barrier]},
                *(spec.get("initContainers") or ()),
            ]
        return spec

    def _with_keeper(
        self,
        pod: Document,
        role: RoleConfig,
        name: str,
        settings: KeeperSettings,
        environ: dict[str, str],
        before: tuple[str, ...],
    ) -> Document:
        """Returns the user's pod, in which the keeper runs the command of its only container. See `render.pod_spec`."""
        (container,) = pod["containers"]
        ours = render.environment_of(role, name, settings, environ)
        # The template has the command.
        added = [each for each in ours if each["name"] != f"{PREFIX}COMMAND"]
        made = {
            "terminationMessagePolicy": "FallbackToLogsOnError",
            **container,
            "command": [*render.command_of(settings, (_EXPORTS_COMMAND, *before)), "bash"],
            "args": [*container["command"], *(container.get("args") or ())],
            "env": with_variables(container.get("env") or (), added),
            "volumeMounts": [*(container.get("volumeMounts") or ()), {"name": VOLUME, "mountPath": MOUNT}],
        }
        account = (
            {} if self.config.service_account is None else {"serviceAccountName": self.config.service_account}
        )
        return {
            **account,
            "restartPolicy": "Never",
            **pod,
            "containers": [made],
            "terminationGracePeriodSeconds": max(
                pod.get("terminationGracePeriodSeconds") or 0, render.grace_of(settings)
            ),
            "volumes": [
                *(pod.get("volumes") or ()),
                {"name": VOLUME, **render.volume_of(self.config.storage, name)},
            ],
        }


def _count(wanted: int | None) -> int:
    return -1 if wanted is None else wanted


def _init_containers(framework: Document) -> set[str]:
    """The names of the init containers of all roles."""
    roles = (framework.get("spec") or {}).get("taskRoles") or []
    specs = (role["task"]["pod"].get("spec") or {} for role in roles)
    return {each["name"] for spec in specs for each in spec.get("initContainers") or []}


def _tasks(attempt: Document) -> Iterator[Document]:
    """The statuses of all tasks, each with the name of its role."""
    for role in attempt.get("taskRoleStatuses") or []:
        for task in role.get("taskStatuses") or []:
            yield {"role": role.get("name"), **task}


def _deciding_task(attempt: Document, trigger: Document) -> Document:
    wanted = trigger.get("taskRoleName"), trigger.get("taskIndex")
    decisive = (task for task in _tasks(attempt) if (task["role"], task.get("index")) == wanted)
    found: Document = next(decisive, {}).get("attemptStatus") or {}
    return found
