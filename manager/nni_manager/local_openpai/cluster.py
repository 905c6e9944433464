"""The cluster: what the HTTP layer calls. One object, used from one event loop; whatever blocks runs in threads.

A job is named by its owner and its name, whoever asks. `user` is who asks; reading is open to everybody.
"""

from __future__ import annotations

from nni_manager.local_openpai.core.states import ExecutionType
from nni_manager.local_openpai.jobs import (
    AttemptSummary,
    EventType,
    JobDetail,
    JobEvent,
    JobSummary,
    LogFile,
    LogPiece,
    StorageView,
    TaskAttempt,
    TaskDetail,
    VirtualClusterView,
)
from nni_manager.local_openpai.settings import ClusterSettings

# What OpenPAI's log service gives with tail-mode.
TAIL_BYTES = 16 * 1024


class Cluster:
    """OpenPAI on this machine. Tasks outlive this object and its process; the next one on the same folder goes on with them."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Touches nothing yet."""
        self.settings = settings

    async def start(self) -> None:
        """Take up the jobs of the state directory, which is made if it is not there.

        Raises:
            StateDirUnusable: it cannot be written, holds something else, or another cluster uses it.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Let go of everything. Tasks go on, and what they do meanwhile is known to the next cluster."""
        raise NotImplementedError

    # ---- what changes jobs

    async def submit(self, user: str, config_text: bytes) -> str:
        """The name of the new job, which is durable and waits for its turn.

        Raises:
            JobInvalid: the text is no job that can run; with all mistakes.
            JobTooLarge: it can never fit into its virtual cluster.
            JobExists: the user has a job of that name already.
            VirtualClusterUnknown, StorageUnknown: it names one that is not there.
            StateBusy: it could not be stored.
        """
        raise NotImplementedError

    async def set_execution_type(
        self, user: str, owner: str, name: str, wanted: ExecutionType, *, is_admin: bool = False
    ) -> None:
        """Stop a job. START changes nothing: neither a job that is on its way nor one that was stopped.

        Returns when that is durable, not when all processes are gone.

        Raises:
            JobUnknown, NotYours, StateBusy.
        """
        raise NotImplementedError

    async def delete(self, user: str, owner: str, name: str, *, is_admin: bool = False) -> None:
        """Forget a job that has ended, with its logs; its name is free again.

        Raises:
            JobUnknown, NotYours, StateBusy.
            StillRunning: it has not ended.
        """
        raise NotImplementedError

    async def add_tag(self, user: str, owner: str, name: str, tag: str, *, is_admin: bool = False) -> None:
        """Mark a job. A tag that it has already is no matter.

        Raises:
            JobUnknown, NotYours, StateBusy.
        """
        raise NotImplementedError

    async def remove_tag(self, user: str, owner: str, name: str, tag: str, *, is_admin: bool = False) -> None:
        """Take a tag away.

        Raises:
            JobUnknown, NotYours, StateBusy.
            TagUnknown: it has no such tag.
        """
        raise NotImplementedError

    # ---- what there is

    async def jobs(self) -> list[JobSummary]:
        """All jobs, the newest first."""
        raise NotImplementedError

    async def job(self, owner: str, name: str, attempt_id: int | None = None) -> JobDetail:
        """A job with its newest attempt, or with the one asked for.

        Raises:
            JobUnknown: no such job, or no such attempt.
        """
        raise NotImplementedError

    async def job_attempts(self, owner: str, name: str) -> list[AttemptSummary]:
        """All attempts of a job, the newest first.

        Raises:
            JobUnknown.
        """
        raise NotImplementedError

    async def task_attempts(
        self, owner: str, name: str, attempt_id: int, role: str, index: int
    ) -> tuple[TaskDetail, list[TaskAttempt]]:
        """A task, and all its attempts within one of the job, the newest first. `role` in either spelling.

        Raises:
            JobUnknown: no such job, attempt or task.
        """
        raise NotImplementedError

    async def config_text(self, owner: str, name: str) -> str:
        """The job as it was submitted, to the last character but for its secrets, which are masked.

        Raises:
            JobUnknown.
        """
        raise NotImplementedError

    async def events(self, owner: str, name: str, event_type: EventType | None = None) -> list[JobEvent]:
        """What happened to a job, the oldest first; of one type, if asked for.

        Raises:
            JobUnknown.
        """
        raise NotImplementedError

    async def log_files(
        self, owner: str, name: str, attempt_id: int, role: str, index: int, task_attempt_id: int
    ) -> list[LogFile]:
        """The logs of a task's attempt. `role` in either spelling.

        Raises:
            JobUnknown: no such job, attempt or task.
            LogUnknown: it has none yet.
        """
        raise NotImplementedError

    async def read_log(
        self,
        owner: str,
        name: str,
        attempt_id: int,
        role: str,
        index: int,
        task_attempt_id: int,
        file_name: str,
        *,
        offset: int | None = None,
        most_bytes: int = TAIL_BYTES,
    ) -> LogPiece:
        """At most so many bytes of a log from `offset` on; without an offset, its end.

        `file_name` is one that `log_files` gives, and nothing else: no way leads out of the task's folder.

        Raises:
            JobUnknown, LogUnknown.
        """
        raise NotImplementedError

    async def virtual_clusters(self) -> list[VirtualClusterView]:
        """The virtual clusters, in the order of the settings."""
        raise NotImplementedError

    async def storages(self) -> list[StorageView]:
        """The storages, in the order of the settings."""
        raise NotImplementedError
