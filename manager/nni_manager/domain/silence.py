"""Jobs that were submitted and whose keeper has never been heard.

A keeper that cannot reach its manager cannot say so, and its trial would wait for ever without a word. Only the job that has
waited longest is looked at, so the question costs the same with any number of jobs.
"""

from dataclasses import dataclass, field

# Long enough for an image that is at hand to start, short enough for a person who watches the first trial.
LONGEST_SILENCE_S = 60.0


@dataclass(slots=True)
class Silence:
    """Who has not been heard, in the order of submission. Times are monotonic.

    `addresses`: where keepers are told to connect to. `needs_network`: nothing but a stream can give their jobs trials.
    """

    addresses: tuple[str, ...] = ()
    needs_network: bool = False
    _submitted_at_s: dict[str, float] = field(default_factory=dict)
    _found: dict[str, float] = field(default_factory=dict)
    """Those that are at work all the same, as the shared storage shows, by when they were submitted."""
    _last_told: str = ""

    def submitted(self, job_id: str, now_s: float) -> None:
        """The cluster has the job; from now on its keeper may connect."""
        if job_id not in self._found:
            self._submitted_at_s.setdefault(job_id, now_s)

    def found(self, job_id: str) -> None:
        """Its keeper has not connected, and the shared storage shows it at work."""
        if job_id in self._submitted_at_s:
            self._found[job_id] = self._submitted_at_s.pop(job_id)

    def broken(self, job_id: str) -> None:
        """Its keeper has connected, or nobody waits for it any more."""
        self._submitted_at_s.pop(job_id, None)
        self._found.pop(job_id, None)

    def problem(self, now_s: float) -> str:
        """What to tell people; the same words as long as the same job is silent, and nothing when none has been for long."""
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
                f"no keeper has connected for {LONGEST_SILENCE_S:g} s since job {job_id} was submitted; it was told {told}; "
                f"see whether the cluster has started the job, then run `trial-keeper doctor` in its container{without}"
            )
        if _first_overdue(self._found, now_s) is not None:
            # The same words for all of them: where one keeper meets a firewall the others do.
            return (
                f"keepers do not reach {told}, so trials are followed over the shared storage, some seconds late; this does no "
                "harm. To use the network, let containers connect to that address"
            )
        return ""

    def news(self, now_s: float) -> str:
        """The problem, if it is another one than when this was last asked."""
        problem, before = self.problem(now_s), self._last_told
        self._last_told = problem
        return problem if problem != before else ""


def _first_overdue(submitted_at_s: dict[str, float], now_s: float) -> str | None:
    """The job that has waited longest, which is the first, if that is too long."""
    longest = next(iter(submitted_at_s), None)
    is_overdue = longest is not None and now_s - submitted_at_s[longest] >= LONGEST_SILENCE_S
    return longest if is_overdue else None
