"""Detects submitted jobs whose keepers have never connected.

A keeper that cannot reach its manager cannot report it, and its trial would wait forever without a message. Only the job that
has waited longest is checked, so a check costs the same with any number of jobs.
"""

from dataclasses import dataclass, field

# Long enough for a container to start from a cached image, short enough for a user who watches the first trial.
MAX_SILENCE_S = 60.0


@dataclass(slots=True)
class ConnectWatchdog:
    """The jobs whose keepers have not connected, in the order of submission. Times are monotonic.

    `addresses`: the addresses to which keepers connect. `needs_network`: trials can be dispatched to jobs only over gRPC.
    """

    addresses: tuple[str, ...] = ()
    needs_network: bool = False
    _submitted_at_s: dict[str, float] = field(default_factory=dict)
    _found: dict[str, float] = field(default_factory=dict)
    """The time of submission of jobs whose keepers have not connected but were found on the shared storage."""
    _last_told: str = ""

    def submitted(self, job_id: str, now_s: float) -> None:
        """Record that the job was submitted: from now on its keeper may connect."""
        if job_id not in self._found:
            self._submitted_at_s.setdefault(job_id, now_s)

    def found(self, job_id: str) -> None:
        """Record that a keeper that has not connected was found on the shared storage."""
        if job_id in self._submitted_at_s:
            self._found[job_id] = self._submitted_at_s.pop(job_id)

    def broken(self, job_id: str) -> None:
        """Stop to watch a job: its keeper has connected, or the job has ended."""
        self._submitted_at_s.pop(job_id, None)
        self._found.pop(job_id, None)

    def problem(self, now_s: float) -> str:
        """A message for users; empty if no job has been silent for too long. It changes only if the silent job does."""
        told = " or ".join(self.addresses)
        job_id = _first_overdue(self._submitted_at_s, now_s)
        if job_id is not None:
            without = (
                ". A job that runs many trials (reuse) gets none without the network, and leaves after two minutes; where there "
                "is no way, write reuse: false"
                if self.needs_network
                else ""
            )
            return (
                f"no keeper has connected for {MAX_SILENCE_S:g} s since job {job_id} was submitted; it was told {told}; "
                f"see whether the cluster has started the job, then run `trial-keeper doctor` in its container{without}"
            )
        if _first_overdue(self._found, now_s) is not None:
            # One text for all jobs: a firewall that blocks one keeper blocks the others as well.
            return (
                f"keepers do not reach {told}, so trials are followed over the shared storage, some seconds late; this does no "
                "harm. To use the network, let containers connect to that address"
            )
        return ""

    def news(self, now_s: float) -> str:
        """The problem if it differs from that of the previous call, else an empty string."""
        problem, before = self.problem(now_s), self._last_told
        self._last_told = problem
        return problem if problem != before else ""


def _first_overdue(submitted_at_s: dict[str, float], now_s: float) -> str | None:
    """The job that has waited longest, which is the first; None if it has not waited for too long."""
    longest = next(iter(submitted_at_s), None)
    is_overdue = longest is not None and now_s - submitted_at_s[longest] >= MAX_SILENCE_S
    return longest if is_overdue else None
