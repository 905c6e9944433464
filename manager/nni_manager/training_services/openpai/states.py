"""The states of OpenPAI's jobs, in our words.

Source: microsoft/pai v1.8.1, src/rest-server/src/models/v2/job/k8s.js (convertState).
"""

from __future__ import annotations

from enum import Enum

from nni_manager.training_services.base import JobPresence


class JobState(Enum):
    """What OpenPAI says of a job. UNKNOWN is its own word for what it cannot tell, and ours for words of other versions."""

    WAITING = "WAITING"  # accepted, or in the queue
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"

    @classmethod
    def of(cls, word: object) -> JobState:
        """The state that this word stands for."""
        return cls(word) if word in cls._value2member_map_ else cls.UNKNOWN

    @property
    def presence(self) -> JobPresence:
        """Whether the job is still there. One in an unknown state is: it will be seen in a known one."""
        return PRESENCE[self]


_S = JobState
PRESENCE: dict[JobState, JobPresence] = {
    _S.WAITING: JobPresence.RUNNING,
    _S.RUNNING: JobPresence.RUNNING,
    _S.STOPPING: JobPresence.RUNNING,
    _S.UNKNOWN: JobPresence.RUNNING,
    _S.SUCCEEDED: JobPresence.ENDED,
    _S.STOPPED: JobPresence.ENDED,
    _S.FAILED: JobPresence.ENDED,
}
OUT_OF_MEMORY = -1200
"""The exit code of a container that was killed because its memory was full (UserContainerDockerOOMKilled)."""
LIVE = (_S.WAITING, _S.RUNNING, _S.STOPPING)
"""What a list of jobs that have not ended is asked for."""
