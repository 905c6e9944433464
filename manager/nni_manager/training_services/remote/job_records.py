"""What a service knows of one job, and the manager's own record of where it runs: jobs/<job>.machine."""

from __future__ import annotations

import json
from pathlib import Path

from nni_manager.store.torn_files import read_state
from nni_manager.training_services.base import JobEnded
from nni_manager.training_services.remote.machine_jobs import JobState
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.small_files import replace_file


@dataclass(slots=True)
class Job:
    """One job. `key`: its machine. `settings`: None for a job of an earlier manager, or once its keeper runs.

    `was_signalled`: the keeper has received SIGTERM; a second one would kill its trial at once.
    """

    job_id: str
    key: str
    settings: KeeperSettings | None = None
    pid: int | None = None
    stop_is_wanted: bool = False
    was_signalled: bool = False
    is_awaited: bool = True
    """True until `submit` or `adopt` has returned; until then no end is reported."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The machine and the GPUs of a job. Written before its start: a job without a record was never started."""

    key: str
    gpu_indices: tuple[int, ...]

    @classmethod
    def of(cls, file: Path) -> JobRecord | None:
        """The record; None if there is none."""
        return read_state(file, cls._parse)

    def write(self, file: Path) -> None:
        """Write the record.

        Raises:
            OSError: it cannot be written.
        """
        content = {"machine": self.key, "gpu_indices": self.gpu_indices}
        replace_file(file, json.dumps(content).encode(), is_durable=True)

    @classmethod
    def _parse(cls, content: bytes) -> JobRecord:
        document = json.loads(content)
        return cls(str(document["machine"]), tuple(map(int, document["gpu_indices"])))


def end_of(job_id: str, state: JobState, where: str) -> JobEnded:
    """The end of a job whose state is that of an ended one. `where`: its machine."""
    if state.has_rebooted:
        why = f"{where} has been restarted, which has ended the job"
        return JobEnded(job_id, None, why, ExitReason.JOB_LOST, is_explained=True)
    return JobEnded(job_id, state.exit_code, state.message)
