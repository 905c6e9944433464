"""Counts consecutive jobs that the cluster has refused permanently.

All jobs of an experiment come from one template. If a few in a row are refused, so will be the others; one accepted job
disproves this.
"""

from dataclasses import dataclass

# One refusal may concern a single job, e.g. a name that exists; three in a row concern the template or the account.
MAX_REFUSALS_IN_A_ROW = 3


@dataclass(slots=True)
class RefusalStreak:
    """Counts permanent refusals since the cluster last accepted a job."""

    count: int = 0

    def refused(self) -> bool:
        """Count one more permanent refusal; True when the experiment should end."""
        self.count += 1
        return self.count >= MAX_REFUSALS_IN_A_ROW

    def accepted(self) -> None:
        """Record that the cluster accepted a job: the streak starts again."""
        self.count = 0

    def describe(self, message: str) -> str:
        """The error message that ends the experiment. `message`: that of the last refusal."""
        return (
            f"cannot submit jobs: the cluster has refused {self.count} in a row, the last with this message: {message}; fix the "
            "cause, then run `nnictl resume`"
        )
