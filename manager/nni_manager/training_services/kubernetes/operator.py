"""What differs between the operators of a cluster: how a job is one of their resources, and what they say of it.

An operator here is pure: it makes documents and reads documents. `service.KubernetesService` makes the calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from nni_manager.config.model import KubernetesConfig
from nni_manager.domain.completion import Completion
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.resources import LOCAL_QUEUES, Resource
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason


class Stage(Enum):
    """How far a job's resource has come."""

    WAITING = auto()  # no task of it has run yet
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a resource in the stage ENDED has ended. `exit_code`: that of the container that decided it; None where none did.

    `pod` is that container's; None when nobody says which it was. `awaits_pod`: that pod's end has not been seen, and is worth a
    moment's wait.
    """

    exit_code: int | None
    message: str
    reason: ExitReason
    pod: str | None = None
    awaits_pod: bool = False


SUCCESS = Verdict(0, "", ExitReason.KEEPER_LOST)


class Operator(ABC):
    """One kind of resources that run pods, for the jobs of one experiment."""

    title: ClassVar[str]
    """Who runs the pods, for people."""

    def __init__(self, config: KubernetesConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def resource(self) -> Resource:
        """What a job is."""

    @property
    @abstractmethod
    def completion(self) -> Completion:
        """The tasks of a job, and when they end its trial."""

    @property
    def things(self) -> tuple[tuple[Resource, str], ...]:
        """What has to be on the cluster for jobs to run, by name, beside what jobs of every operator need."""
        return ((LOCAL_QUEUES, self.config.queue),) if self.config.queue is not None else ()

    @property
    def some_of(self) -> tuple[str, ...]:
        """Fields of a resource's spec of which the cluster has to know one; a release that knows none is too old."""
        return ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What users should know before they start."""
        return ()

    @abstractmethod
    def name_of(self, experiment_id: str, job_id: str) -> str:
        """The name of a job's resource. Two jobs may have the same; the service then makes the later one wait."""

    @abstractmethod
    def render(self, namespace: str, settings: KeeperSettings) -> Document:
        """The job. `settings` are those of its keepers, as containers see paths; the token is left to a secret.

        Its labels, and those of its pods, are `render.labels_of` the job.
        """

    @abstractmethod
    def stage_of(self, document: Document) -> Stage:
        """How far it has come. One of which nothing is known has not begun."""

    @abstractmethod
    def verdict_of(self, document: Document, pods: Mapping[str, Document]) -> Verdict:
        """How a resource in the stage ENDED has ended. `pods` are those of the job that were seen, by name."""

    def why_it_waits(self, document: Document) -> str:
        """What keeps the job from having pods; empty where its pods tell, or nothing is known."""
        return ""
