"""The interface to a cluster's operators: renders a job as a resource, and interprets the resource's status.

An operator is pure: it renders and interprets documents. `resource_calls.ResourceCalls` makes the calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum, auto
from typing import ClassVar

from nni_manager.domain.completion import Completion
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.render import labels_of
from nni_manager.training_services.kubernetes.resources import LOCAL_QUEUES, Resource
from nni_manager.training_services.kubernetes.section import KubernetesConfig
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason


class Stage(Enum):
    """The stage of a job's resource."""

    WAITING = auto()  # no task has run yet
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The outcome of a resource in stage ENDED. `exit_code` is that of the deciding container; None: no container decided it.

    `pod` is that container's; None: unknown. `awaits_pod`: the pod's end is not seen yet, so a short wait is useful. `cause`: why
    the pod failed, in one line, if only the operator reports it.
    """

    exit_code: int | None
    message: str
    reason: ExitReason
    pod: str | None = None
    awaits_pod: bool = False
    cause: str = ""


SUCCESS = JobOutcome(0, "", ExitReason.KEEPER_LOST)


class Operator(ABC):
    """One kind of resource that runs pods, for the jobs of one experiment."""

    title: ClassVar[str]
    """The operator's name, for people."""
    required_fields: ClassVar[tuple[str, ...]] = ()
    """Spec fields of which the cluster must support at least one; a release without any is too old."""
    first_server: ClassVar[tuple[int, int] | None] = None
    """The first version of Kubernetes that has what the jobs need; None: any has."""

    def __init__(self, config: KubernetesConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def resource(self) -> Resource:
        """The resource that represents a job."""

    @property
    @abstractmethod
    def completion(self) -> Completion:
        """The tasks of a job, and the rule by which they end its trial."""

    @property
    def required_objects(self) -> tuple[tuple[Resource, str], ...]:
        """The objects that must exist on the cluster, by name, besides those that every operator's jobs need."""
        return ((LOCAL_QUEUES, self.config.queue),) if self.config.queue is not None else ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for users before the experiment starts."""
        return ()

    @abstractmethod
    def name_of(self, experiment_id: str, job_id: str) -> str:
        """Returns the name of a job's resource. Names of two jobs may collide; the service then delays the later one."""

    def render(self, namespace: str, settings: KeeperSettings) -> Document:
        """Returns the job's document. `settings` are its keepers', with paths as containers see them; a secret holds the token.

        Its labels, and those of its pods, include `render.labels_of` the job.
        """
        name = self.name_of(settings.experiment_id, settings.job_id)
        labels = labels_of(settings.experiment_id, settings.job_id)
        return {
            "apiVersion": self.resource.api_version,
            "kind": self.resource.kind,
            "metadata": {"name": name, "namespace": namespace, **self.metadata(labels)},
            "spec": self.spec(name, settings, labels),
        }

    @abstractmethod
    def metadata(self, labels: dict[str, str]) -> Document:
        """Returns the metadata of a job besides its name. `labels` are the job's."""

    @abstractmethod
    def spec(self, name: str, settings: KeeperSettings, labels: dict[str, str]) -> Document:
        """Returns the operator's own part of a job named `name`. All its pods have the job's `labels`."""

    @abstractmethod
    def stage_of(self, document: Document) -> Stage:
        """Returns the stage of a resource. Without a status it is WAITING."""

    @abstractmethod
    def verdict_of(self, document: Document, pods: Mapping[str, Document]) -> JobOutcome:
        """Returns the outcome of a resource in stage ENDED. `pods` are the job's pods seen so far, by name."""

    def pod_uids_of(self, document: Document) -> Mapping[str, str]:
        """Returns the uids of the job's pods that the resource names, by pod name; empty if it names none."""
        return {}

    def unreported_pod(self, document: Document) -> Document | None:
        """Returns a pod of the job, of which the operator does not report that the cluster refuses it; None: it reports all."""
        return None

    def suspension(self, document: Document) -> str:
        """Returns why a job that has started was suspended, and when it starts again, for people; empty if it was not."""
        return ""

    def pending_reason(self, document: Document) -> str:
        """Returns the reason why the job has no pods; empty if unknown, or if the pods explain more."""
        return ""
