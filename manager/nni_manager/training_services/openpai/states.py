"""OpenPAI's job states, and their mapping to ours.

Source: microsoft/pai v1.8.1, src/rest-server/src/models/v2/job/k8s.js (convertState).
"""

from __future__ import annotations

from enum import Enum


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
    def is_terminal(self) -> bool:
        """True if the job has ended. UNKNOWN is not terminal, because a later poll shows a known state."""
        return self in (PaiJobState.SUCCEEDED, PaiJobState.STOPPED, PaiJobState.FAILED)


OUT_OF_MEMORY = -1200
"""The exit code of a container that was killed for lack of memory (UserContainerDockerOOMKilled)."""
LIVE = (PaiJobState.WAITING, PaiJobState.RUNNING, PaiJobState.STOPPING)
"""The states that select live jobs in a list request."""
