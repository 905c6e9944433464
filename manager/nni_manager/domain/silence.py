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

    `addresses`: where keepers are told to connect to.
    """

    addresses: tuple[str, ...] = ()
    _submitted_at_s: dict[str, float] = field(default_factory=dict)
    _last_told: str = ""

    def submitted(self, job_id: str, now_s: float) -> None:
        """The cluster has the job; from now on its keeper may connect."""
        self._submitted_at_s.setdefault(job_id, now_s)

    def broken(self, job_id: str) -> None:
        """Its keeper has connected, or nobody waits for it any more."""
        self._submitted_at_s.pop(job_id, None)

    def problem(self, now_s: float) -> str:
        """What to tell people; the same words as long as the same job is silent, and nothing when none has been for long."""
        for job_id, submitted_at_s in self._submitted_at_s.items():
            if now_s - submitted_at_s < LONGEST_SILENCE_S:
                break
            told = " or ".join(self.addresses)
            return (
                f"no keeper has connected for {LONGEST_SILENCE_S:g} s since job {job_id} was submitted; it was told {told}; "
                "see whether the cluster has started the job, then run `trial-keeper doctor` in its container"
            )
        return ""

    def news(self, now_s: float) -> str:
        """The problem, if it is another one than when this was last asked."""
        problem, before = self.problem(now_s), self._last_told
        self._last_told = problem
        return problem if problem != before else ""
