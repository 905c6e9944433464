"""Follows an experiment: a live view on a terminal, one line per event elsewhere, and the results at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nni_manager.client import output
from nni_manager.client.experiments import KnownExperiment
from nni_manager.client.manager_client import ManagerClient, ManagerUnresponsive
from nni_manager.client.results import duration_s
from nni_manager.domain.message_summary import outline, why_it_ended
from nni_manager.errors import RetryableError, UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

Summary = Mapping[str, Any]
Document = Mapping[str, Any]
ShowSummary = Callable[[Summary], None]

# A redraw interval that looks live and uses almost no CPU.
REDRAW_INTERVAL_S = 0.25
# A summary costs the manager a millisecond.
MIN_POLL_S = 0.02
# The next trial usually starts within this time after one ends, so one line reports both.
_NEXT_START_TIMEOUT_S = 1.0
_OVER = ("DONE", "ERROR", "STOPPED")
_ENDED = ("SUCCEEDED", "FAILED", "USER_CANCELED", "SYS_CANCELED", "EARLY_STOPPED")
_STATE_LABELS = {
    "USER_CANCELED": "stopped by user",
    "SYS_CANCELED": "stopped at the time limit",
    "EARLY_STOPPED": "early stopped",
}
_COLORS = {"SUCCEEDED": "green", "FAILED": "red", "RUNNING": "cyan", "ERROR": "red", "DONE": "green"}
# A busy manager answers sooner; after this time it is stuck.
_MANAGER_TIMEOUT_S = 30.0


class ExperimentFailed(UserError):
    """cannot finish the experiment: it ended with an error or without a result; its log names the cause"""

    # A service manager must not start it again, as after a crash of the manager.
    exit_code = 3


class ExperimentStopped(ExperimentFailed):
    """cannot finish the experiment: it was stopped; resume it"""

    exit_code = 130  # as after Ctrl-C


def follow(
    known: KnownExperiment, every_s: float = REDRAW_INTERVAL_S, show: ShowSummary | None = None
) -> Summary:
    """Show the experiment until it is terminal and none of its trials runs; return the last summary.

    `show` None: with `display`.

    Raises:
        RetryableError: its manager died, or does not answer.
    """
    client = known.client()
    if client is None:
        return _summary_without_manager(known, lambda _: None)
    answered_at_s, pause_s = time.monotonic(), every_s
    with display() if show is None else contextlib.nullcontext(show) as show_summary:
        while True:
            try:
                summary: Summary = client.summary()
                answered_at_s = time.monotonic()
            except ManagerUnresponsive as error:
                if (manager := known.running_process()) is None:
                    return _summary_without_manager(known, show_summary)
                if time.monotonic() - answered_at_s > _MANAGER_TIMEOUT_S:
                    raise RetryableError(
                        f"cannot follow experiment {known.experiment_id}: its manager has not answered for "
                        f"{_MANAGER_TIMEOUT_S:.0f} s, but may still run; try `nnictl top {known.experiment_id}` later"
                    ) from error
                client = ManagerClient(
                    known.experiment_id, manager
                )  # with a certificate that was renewed meanwhile
            else:
                show_summary(summary)
                counts = summary["counts"]
                if summary["status"] in _OVER and not counts["RUNNING"] and not counts["WAITING"]:
                    return summary
                pause_s = _pause_s(summary, every_s)
            time.sleep(pause_s)


def _pause_s(summary: Summary, every_s: float) -> float:
    """The time to the next poll: half of the time that the trials still need, so that the end of short ones is seen soon.

    While that is unknown, a quarter of the time so far.
    """
    left_s = _trials_left_s(summary)
    pause_s = summary["elapsedS"] / 4 if left_s is None else left_s / 2
    return min(every_s, max(pause_s, MIN_POLL_S))


def _summary_without_manager(known: KnownExperiment, show_summary: ShowSummary) -> Summary:
    if known.stored.status()["isTerminal"]:
        # Another process has stopped the experiment.
        summary: Summary = known.stored.get("/summary")
        show_summary(summary)
        return summary
    process = f" (process {known.manager.pid})" if known.manager is not None else ""
    raise RetryableError(
        f"cannot follow experiment {known.experiment_id}: its manager{process} died; "
        f"its trials continue; `nnictl resume {known.experiment_id} --foreground` finds them; logs are in {known.folder.log}"
    )


@contextlib.contextmanager
def display() -> Iterator[ShowSummary]:
    """A live view where messages go to a terminal, lines elsewhere. The last output remains visible."""
    stream = output.messages()
    if stream is None or not stream.isatty():
        yield _Lines().show
        return
    # Imported here: the imports take 40 ms, and only the live view needs them.
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=stream, highlight=False), auto_refresh=False) as live:
        yield lambda summary: live.update(draw(summary), refresh=True)


def ended(summary: Summary) -> int:
    """The number of terminal trials."""
    return sum(summary["counts"].get(state, 0) for state in _ENDED)


def of_all(summary: Summary) -> str:
    """The progress: 3/20, or 3 if there is no limit."""
    limit = summary["maxTrialNum"]
    return str(ended(summary)) if limit is None else f"{ended(summary)}/{limit}"


def why(trial: Document) -> str:
    """The failure of a trial on one line: how it ended, and its message or its exception."""
    return why_it_ended(str(trial["reason"] or trial["state"]), trial["exitCode"], trial["message"] or "")


class _Lines:
    """For logs: one line when a trial ends, when more trials run than last shown, or when the experiment's state changes."""

    def __init__(self) -> None:
        self._shown: tuple[str, int] | None = None
        self._running_shown = 0
        self._most_running = 0
        self._changed_at_s: float | None = None
        self._printed: set[str] = set()

    def show(self, summary: Summary) -> None:
        """Print changes since the last call."""
        for trial in reversed(summary["latestFailures"]):
            if trial["id"] not in self._printed:
                self._printed.add(trial["id"])
                output.warning(f"trial {trial['id']} failed: {why(trial)}")
        valueless = summary["latestWithoutResult"]
        if valueless is not None and valueless["message"] not in self._printed:
            # Once per reason: usually the same bug in a script affects all of its trials.
            self._printed.add(valueless["message"])
            output.warning(f"trial {valueless['id']} succeeded without a value: {valueless['message']}")
        errors, counts = summary["errors"], summary["counts"]
        # The verdict, which follows the end of the last trial, contains a single error.
        is_last = summary["status"] == "ERROR" and not counts.get("RUNNING") and not counts.get("WAITING")
        shown_here = [] if is_last and len(errors) == 1 else errors
        for problem in [summary["problem"], *shown_here]:
            if problem and problem not in self._printed:
                self._printed.add(problem)
                output.warning(outline(problem))
        running = summary["counts"]["RUNNING"]
        self._most_running = max(self._most_running, running)
        now = (summary["status"], ended(summary))
        if now == self._shown and running <= self._running_shown:
            self._changed_at_s = None
            return
        if self._changed_at_s is None:
            self._changed_at_s = time.monotonic()
        may_start_another = running < self._most_running and summary["counts"]["WAITING"]
        if may_start_another and time.monotonic() - self._changed_at_s < _NEXT_START_TIMEOUT_S:
            return
        self._shown, self._running_shown, self._changed_at_s = now, running, None
        parts = [f"{of_all(summary)} ended", f"{running} running"]
        if front := front_of(summary):
            parts.append(front)
        elif summary["best"] is not None:
            parts.append(f"best {output.number(summary['best']['value'])} (trial {summary['best']['id']})")
        if left := time_left(summary):
            parts.append(left)
        state = "" if summary["status"] == "RUNNING" else f" {summary['status']}"
        output.plain(f"[{output.clock(summary['elapsedS'])}]{state} {', '.join(parts)}")


def draw(summary: Summary) -> RenderableType:
    """The live view of a summary."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    status = summary["status"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    name = f"{summary['id']} {summary['name']}  "
    grid.add_row("experiment", Text.assemble(name, (status, _COLORS.get(status, "yellow"))))
    limit = summary["maxTrialNum"]
    if limit:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=limit, completed=min(ended(summary), limit), width=40), of_all(summary))
        grid.add_row("trials", bar)
    counts = [(state, count) for state, count in summary["counts"].items() if count]
    pieces = [
        (f"{count} {_STATE_LABELS.get(state, state.lower())}  ", _COLORS.get(state, "yellow"))
        for state, count in counts
    ]
    grid.add_row("" if limit else "trials", Text.assemble(*pieces) if pieces else Text("none yet"))
    grid.add_row(
        "time", Text(", ".join(filter(None, (output.clock(summary["elapsedS"]), time_left(summary)))))
    )
    best = summary["best"]
    if front := front_of(summary):
        grid.add_row("best", Text(front, style="bold green"))
        for trial in summary["top"]:
            grid.add_row("", Text(f"{objectives_text(summary, trial)}  trial {trial['id']}"))
    elif best is not None:
        grid.add_row(
            "best", Text.assemble((output.number(best["value"]), "bold green"), f"  trial {best['id']}  ")
        )
        grid.add_row("", Text(output.parameters(best["parameters"]), style="dim"))
    for trial in summary["latestFailures"][:1]:
        grid.add_row("last failure", Text(f"trial {trial['id']}: {why(trial)}", style="red"))
    valueless = summary["latestWithoutResult"]
    if valueless is not None:
        grid.add_row("no value", Text(f"trial {valueless['id']}: {valueless['message']}", style="yellow"))
    for problem in [summary["problem"], *summary["errors"]]:
        if problem:
            grid.add_row("problem", Text(outline(problem), style="red"))
    return grid


def front_of(summary: Summary) -> str:
    """The number of trials on the Pareto front as text; empty with one objective, or without a result."""
    # A manager of an earlier version reports neither.
    count = summary.get("front", {}).get("count")
    if len(summary.get("objectives", ())) < 2 or not count:
        return ""
    return f"{count} trial{'s' if count > 1 else ''} on the Pareto front"


def objectives_text(summary: Summary, trial: Document) -> str:
    """The number of each objective: accuracy=0.93 latency_ms=12."""
    pairs = zip(summary["objectives"], trial.get("values", ()), strict=False)
    return " ".join(f"{each['metric']}={output.number(value)}" for each, value in pairs)


def time_left(summary: Summary) -> str:
    """The remaining time as text; empty if it is unknown, or the experiment is terminal.

    The time to the time limit or, if that is sooner, the estimated time until all trials have ended at the rate so far.
    """
    elapsed, limit = summary["elapsedS"], summary["maxExecDurationS"]
    if summary["status"] in _OVER:
        return ""
    trials_s = _trials_left_s(summary)
    if trials_s is not None and (limit is None or trials_s < limit - elapsed):
        return f"about {output.clock(trials_s)} left"
    return "" if limit is None else f"{output.clock(limit - elapsed)} left"


def _trials_left_s(summary: Summary) -> float | None:
    """The estimated time until all trials have ended, at the rate so far; None if it is unknown."""
    count, most = ended(summary), summary["maxTrialNum"]
    return summary["elapsedS"] / count * (most - count) if most is not None and count else None


def trial_cells(trial: Document) -> list[str]:
    """The cells of a trial's row: value, duration, parameters; and, without a value, the reason."""
    took_s = duration_s(trial)
    duration = "" if took_s is None else output.duration(took_s)
    parameters = output.parameters(trial["parameters"])
    if trial["state"] == "FAILED":
        parameters += f"  ({why(trial)})"
    elif trial["state"] in ("WAITING", "RUNNING", "CLOSING") and trial["message"]:
        parameters += f"  ({trial['message'].splitlines()[0]})"
    elif trial["state"] == "SUCCEEDED" and trial["value"] is None:
        parameters += f"  ({trial['message']})"
    elif trial["state"] in ("USER_CANCELED", "SYS_CANCELED") and trial["reason"]:
        parameters += f"  ({trial['reason']})"
    if trial.get("violates"):
        parameters += f"  (violates {', '.join(trial['violates'])})"
    if trial["warning"]:
        parameters += f"  ({'; '.join(trial['warning'].splitlines())})"
    return [output.number(trial["value"]), duration, parameters]


def show_results(summary: Summary, known: KnownExperiment) -> None:
    """Print the best trials, and where to find all results and logs."""
    if summary["top"] and front_of(summary):
        _show_front(summary)
    elif summary["top"]:
        rows = [
            [str(place), trial["id"], *trial_cells(trial)] for place, trial in enumerate(summary["top"], 1)
        ]
        headings = ["#", "trial", "value", "time", "parameters"]
        output.plain()
        output.print_table(headings, rows, right=("#", "value", "time"))
        output.plain()
    name = known.experiment_id
    output.plain(f"All trials:       nnictl trial ls {name}")
    output.plain(f"Output of one:    nnictl log trial {name} --trial-id TRIAL")
    output.plain(f"The page again:   nnictl view {name}")
    output.plain(f"Everything in:    {known.folder.path}")


def _show_front(summary: Summary) -> None:
    """Print trials of the Pareto front, in the order of the first objective."""
    metrics = [each["metric"] for each in summary["objectives"]]
    rows = []
    for trial in summary["top"]:
        _, time, parameters = trial_cells(trial)
        rows.append([trial["id"], *map(output.number, trial["values"]), time, parameters])
    shown, count = len(rows), summary["front"]["count"]
    output.plain()
    output.plain(f"On the Pareto front: {count} trials{'' if shown == count else f'; {shown} of them'}")
    output.print_table(["trial", *metrics, "time", "parameters"], rows, right=(*metrics, "time"))
    output.plain()


def verdict(summary: Summary) -> ExperimentFailed | None:
    """The error that describes why the experiment failed; None if it is DONE and at least one trial has a value."""
    name = summary["id"]
    if summary["status"] == "ERROR":
        errors = "\n".join(filter(str.strip, summary["errors"]))
        return ExperimentFailed(f"cannot finish experiment {name}: {outline(errors or 'it failed')}")
    if summary["status"] == "STOPPED":
        return ExperimentStopped(
            f"cannot finish experiment {name}: it was stopped after {of_all(summary)} trials; "
            f"`nnictl resume {name}` resumes it"
        )
    if summary["best"] is not None or front_of(summary):
        return None
    valueless = summary["latestWithoutResult"]
    if valueless is not None:
        return ExperimentFailed(
            f"cannot find a best trial of experiment {name}: none of {ended(summary)} trials has a value; "
            f"the last one that succeeded ({valueless['id']}): {valueless['message']}"
        )
    failures = summary["latestFailures"]
    succeeded = summary["counts"].get("SUCCEEDED", 0)
    if succeeded and summary.get("constraints"):
        return ExperimentFailed(
            f"cannot find a best trial of experiment {name}: each of {succeeded} results violates a constraint "
            f"({', '.join(summary['constraints'])}); loosen it, or run more trials"
        )
    if not failures:
        counts = [(summary["counts"].get(state, 0), label) for state, label in _STATE_LABELS.items()]
        how = ", ".join(f"{count} {label}" for count, label in counts if count)
        if not how:
            return ExperimentFailed(
                f"cannot finish experiment {name}: it has no trials, because its tuner proposed none; check the tuner and its "
                "classArgs"
            )
        more = "raise maxTrialDuration; " if summary["counts"].get("SYS_CANCELED") else ""
        return ExperimentFailed(
            f"cannot finish experiment {name}: none of {ended(summary)} trials succeeded: {how}; "
            f"{more}`nnictl trial ls {name}` shows how each ended"
        )
    trial = failures[0]
    return ExperimentFailed(
        f"cannot finish experiment {name}: none of {ended(summary)} trials succeeded; the last one ({trial['id']}): "
        f"{why(trial)}; `nnictl log trial {name} --trial-id {trial['id']} --stream stderr` shows its full stderr"
    )
