"""OpenPAI's job states, and their mapping to ours.

Source: microsoft/pai v1.8.1, src/rest-server/src/models/v2/job/k8s.js (convertState).
"""

from __future__ import annotations

from enum import Enum

from nni_manager.training_services.base import JobPresence


class PaiJobState(Enum):
    """OpenPAI's job states. UNKNOWN is both OpenPAI's own and ours for states of other versions."""

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
    def presence(self) -> JobPresence:
        """Whether the job is alive. UNKNOWN counts as alive, because a later poll shows a known state."""
        return PRESENCE[self]


_S = PaiJobState
PRESENCE: dict[PaiJobState, JobPresence] = {
    _S.WAITING: JobPresence.RUNNING,
    _S.RUNNING: JobPresence.RUNNING,
    _S.STOPPING: JobPresence.RUNNING,
    _S.UNKNOWN: JobPresence.RUNNING,
    _S.SUCCEEDED: JobPresence.ENDED,
    _S.STOPPED: JobPresence.ENDED,
    _S.FAILED: JobPresence.ENDED,
}
OUT_OF_MEMORY = -1200
"""The exit code of a container that was killed for lack of memory (UserContainerDockerOOMKilled)."""
LIVE = (_S.WAITING, _S.RUNNING, _S.STOPPING)
"""The states that select live jobs in a list request."""
