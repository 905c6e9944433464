"""What Slurm prints about jobs, as job states and as errors. Pure functions.

Source: squeue(1), job state codes; Slurm 22.05 to 25.05, slurm_errno.c.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nni_manager.errors import NniManagerError, UserError
from nni_manager.training_services.errors import ClusterUnavailable, QuotaExceeded
from nni_manager.training_services.slurm.render import seconds_of
from trial_keeper.exit_codes import of_signal
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.reasons import ExitReason

FORMAT = ",".join(
    f"{field}:|"
    for field in ("JobArrayID", "Name", "State", "exit_code", "PreemptTime", "TimeLeft", "NodeList", "Reason")
)
"""The argument of squeue's --Format. The reason is last: Slurm's administrators write some of them.

JobArrayID is the id of a job, or that of an array and the number of its task: 123 or 123_4.
"""
SACCT_FORMAT = "JobID,JobName,State,ExitCode,NodeList"

# The reasons of trials that end with jobs in these states; a job in any other state, known or not, has not ended.
_REASONS = {
    "COMPLETED": ExitReason.KEEPER_LOST,
    "FAILED": ExitReason.KEEPER_LOST,
    "OUT_OF_MEMORY": ExitReason.OUT_OF_MEMORY,
    "PREEMPTED": ExitReason.PREEMPTED,
    "CANCELLED": ExitReason.JOB_LOST,
    "TIMEOUT": ExitReason.JOB_LOST,
    "DEADLINE": ExitReason.JOB_LOST,
    "NODE_FAIL": ExitReason.JOB_LOST,
    "BOOT_FAIL": ExitReason.JOB_LOST,
    "LAUNCH_FAILED": ExitReason.JOB_LOST,
    "RECONFIG_FAIL": ExitReason.JOB_LOST,
    "REVOKED": ExitReason.JOB_LOST,
}
_MEANINGS = {
    "TIMEOUT": ": it reached its time limit; raise timeLimit, or save checkpoints",
    "DEADLINE": ": it reached its --deadline; remove that, or set a shorter timeLimit",
    "OUT_OF_MEMORY": ": it used more than its memory; raise memory",
    "PREEMPTED": ": preempted by a job of higher priority",
    "NODE_FAIL": ": a node of it failed",
}
_NO_OUTPUT = (
    ": the node could not open the file for its output; set experimentWorkingDirectory to a folder that the compute nodes "
    "share"
)
_NOTHING = ("", "None", "N/A", "NONE", "Unknown", "(null)")
# The batch script ended by itself, so that its exit code says more than these.
_PLAIN_REASONS = (*_NOTHING, "NonZeroExitCode", "JobLaunchFailure", "TimeLimit", "NodeDown", "OutOfMemory")
# Slurm's own number in place of a signal: the node could not open the file for the output.
_LAUNCH_FAILED = 53
# Slurm sends the notice of a time limit up to a minute early.
_NEAR_LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job as squeue or sacct shows it. `state` is Slurm's word; `exit_status` as wait(2) has it.

    `time_left_s`: until the time limit; None without one.
    """

    slurm_id: str
    name: str
    state: str
    exit_status: int
    preempt_time: str
    time_left_s: int | None
    nodes: str
    reason: str

    @property
    def number(self) -> int:
        """The id of the job, or of the array that it is a task of; later ones are larger, until slurmctld loses its state."""
        return int(self.slurm_id.partition("_")[0])

    @property
    def task(self) -> int | None:
        """The number of the task in its array; None for another job, and for what is left of an array without pending tasks."""
        task = self.slurm_id.partition("_")[2]
        return int(task) if task.isdigit() else None

    @property
    def has_ended(self) -> bool:
        """True if the job ended, and its processes too."""
        return self.state.partition(" ")[0] in _REASONS

    @property
    def is_pending(self) -> bool:
        """True if the job has not started."""
        return self.state == "PENDING"

    @property
    def pending_reason(self) -> str:
        """Why the job has not started, in Slurm's words; empty if it has."""
        return self.reason if self.is_pending and self.reason not in _NOTHING else ""

    @property
    def warning(self) -> str:
        """What may end a job that runs; empty if nothing is known."""
        if self.is_preempted:
            return f"Slurm preempts job {self.slurm_id} at the end of its grace time, which began at {self.preempt_time}"
        return f"Slurm has suspended job {self.slurm_id}" if self.state == "SUSPENDED" else ""

    @property
    def is_preempted(self) -> bool:
        """True while Slurm lets a job run on for the grace time of its partition or QOS."""
        return not self.has_ended and self.preempt_time not in _NOTHING


@dataclass(frozen=True, slots=True)
class JobEndState:
    """How a job ended; see `JobEnded`."""

    exit_code: int | None
    message: str
    reason: ExitReason
    is_explained: bool = True


def parse_squeue(printed: str, prefix: str) -> list[JobRow]:
    """The jobs that squeue prints in `FORMAT`, of those whose names start with `prefix`: other names may contain anything.

    Raises:
        ValueError: it printed something else.
    """
    lines = [line.split("|", 7) for line in printed.splitlines() if line]
    if lines and all(len(parts) != 8 for parts in lines):
        raise ValueError(printed[:200])
    rows = []
    for parts in lines:
        if len(parts) != 8 or not parts[1].startswith(prefix):
            continue
        slurm_id, name, state, exit_code, preempt_time, left, nodes, reason = parts
        reason = reason.removesuffix("|").strip()
        times = (preempt_time, seconds_of(left))
        rows.append(JobRow(slurm_id, name, state, _exit_status(exit_code), *times, nodes, reason))
    return rows


def parse_sacct(printed: str) -> list[JobRow]:
    """The jobs that sacct prints in `SACCT_FORMAT`, with vertical bars.

    Raises:
        ValueError: it printed something else.
    """
    rows = []
    for line in filter(None, printed.splitlines()):
        slurm_id, name, state, exit_code, nodes = line.split("|")
        rows.append(JobRow(slurm_id, name, state, _exit_status(exit_code), "", None, nodes, ""))
    return rows


def _exit_status(printed: str) -> int:
    code, colon, number = printed.partition(":")
    return (int(code) << 8) + int(number) if colon else int(code)


def end_of(row: JobRow, log: str, *, was_stopped: bool) -> JobEndState:
    """How an ended job ended. `log`: the last lines of its output. `was_stopped`: this manager requested it."""
    state = row.state.partition(" ")[0]
    reason, number, code = _REASONS[state], row.exit_status & 0x7F, row.exit_status >> 8
    job = f"job {row.slurm_id} ({row.name})"
    said = f"Slurm reports {job}: {row.state}"
    exit_code = None if reason is not ExitReason.KEEPER_LOST else of_signal(number) if number else code
    if was_stopped and state in ("CANCELLED", "COMPLETED", "FAILED"):
        return JobEndState(exit_code, f"Slurm has ended {job} on request", reason)
    if state == "CANCELLED":
        return JobEndState(None, f"{said}, but not by this manager", reason)
    if reason is not ExitReason.KEEPER_LOST:
        message = f"{said}{_where(row)}{_MEANINGS.get(state, '')}"
        return JobEndState(None, _joined(message, log), reason)
    if row.preempt_time not in _NOTHING:
        message = f"{said}{_where(row)} in the grace time after it was preempted"
        return JobEndState(None, message, ExitReason.PREEMPTED)
    if number == _LAUNCH_FAILED:
        message = f"{said}{_where(row)}{_NO_OUTPUT}"
        return JobEndState(None, message, ExitReason.COULD_NOT_START)
    left_s = row.time_left_s
    is_near = left_s is not None and left_s <= _NEAR_LIMIT_S
    near = f", {left_s} s before its time limit; raise timeLimit if it was not done" if is_near else ""
    if state == "COMPLETED":
        return JobEndState(0, f"{said}{near}" if near else "", reason, is_explained=False)
    how = f"signal {number}" if number else f"exit code {code}"
    message = f"{said}, {how}{_where(row)}{near}"
    return JobEndState(exit_code, _joined(message, log), reason, is_explained=False)


def end_of_forgotten_task(slurm_id: str, name: str, *, was_stopped: bool) -> JobEndState:
    """How an array task ended that has not started, and that Slurm does not list although it lists its array."""
    job = f"job {slurm_id} ({name})"
    if was_stopped:
        return JobEndState(None, f"Slurm has ended {job} on request", ExitReason.JOB_LOST)
    why = "is not known to Slurm any more: it was cancelled before it started, or ended without output"
    return JobEndState(None, f"{job} {why}", ExitReason.JOB_LOST)


def _where(row: JobRow) -> str:
    on = f" on {row.nodes}" if row.nodes not in _NOTHING else ""
    return on if row.reason in _PLAIN_REASONS else f"{on} ({row.reason})"


def _joined(message: str, log: str) -> str:
    return "\n".join(filter(None, (message, log)))


# ---- errors

# A later try may succeed: the controller is down or busy, or munge is.
_UNAVAILABLE = re.compile(
    r"contact slurm controller|timed out|Zero Bytes|not connected|[Cc]onnection|standby mode|authentication|"
    r"Munge|temporarily un|[Cc]ommunication|Try again|Unable to establish|shutting down|Incompatible versions"
)
# The cluster's limits for waiting and running jobs.
_LIMITS = re.compile(r"accounting/QOS policy|MaxSubmit|job submit limit|unable to accept (more )?job|MaxJobs")
# The key to correct, and a command that shows its valid values.
_KEYS = (
    ("account", "account", "`sacctmgr show associations user=$USER`"),
    ("partition", "partition", "`sinfo --summarize`"),
    ("qos", "qos", "`sacctmgr show qos`"),
    ("time", "timeLimit", "`sinfo --format='%P %l'`"),
    ("generic resource", "gres or gpus", "`sinfo --format='%P %G'`"),
    ("feature", "constraint", "`sinfo --format='%P %f'`"),
    ("memory", "memory", "`sinfo --format='%P %m'`"),
    ("node", "nodes, gres or cpusPerTask", "`sinfo --format='%P %D %c %m %G'`"),
)


def error_of(command: str, printed: str) -> NniManagerError:
    """The error for a command that has failed, from what it printed on stderr."""
    said = "; ".join(_last_lines(printed)) or "it printed nothing"
    if _LIMITS.search(printed):
        return QuotaExceeded(
            f"cannot submit the job yet: `{command}` printed: {said}; it is submitted again when other jobs have ended; if you "
            "have none in the queue, request less"
        )
    if _UNAVAILABLE.search(printed):
        return ClusterUnavailable(
            f"cannot reach Slurm: `{command}` printed: {said}; check slurmctld with `scontrol ping`, and munged"
        )
    lowered = printed.lower()
    for word, key, known in _KEYS:
        if word in lowered:
            return UserError(
                f"cannot run this job on Slurm: `{command}` printed: {said}; correct {key} in the experiment file, {known} shows "
                "what there is"
            )
    return UserError(
        f"cannot run this job on Slurm: `{command}` printed: {said}; correct the options in trainingService"
    )


def _last_lines(printed: str) -> Iterable[str]:
    """What a command printed, without its name and without repetition."""
    lines = (re.sub(r"^\w+: (error: )?", "", line.strip()) for line in printed.splitlines())
    return list(dict.fromkeys(filter(None, lines)))[-3:]


def unsignalled(printed: str) -> set[str]:
    """The ids of the jobs that scancel could not signal, from what it printed: they have ended, or not started."""
    return set(re.findall(r"job(?: step)? id (\d+(?:_\d+)?)", printed))
