"""What nnictl says to people: lines with NNI's prefixes, times, numbers, and tables."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RULE = "-" * 84
# A pipe has no width; this one fits a log viewer and still shows the parameters of most trials on one line.
_PIPE_COLUMNS = 140


def info(message: str) -> None:
    """A step that was done, on stdout."""
    _say("INFO", "green", message, sys.stdout)


def warning(message: str) -> None:
    """Something the user should know and that stops nothing, on stderr."""
    _say("WARNING", "yellow", message, sys.stderr)


def error(message: str) -> None:
    """What could not be done, on stderr, on one line."""
    _say("ERROR", "red", " ".join(message.split()), sys.stderr)


def trial_warning(trial: Mapping[str, Any]) -> None:
    """What a trial's user should know of it; nothing where there is nothing."""
    for line in trial["warning"].splitlines():
        warning(f"trial {trial['id']}: {line}")


def plain(text: str = "") -> None:
    """A line as it is, on stdout."""
    with _unless_nobody_reads():
        click.echo(text, color=_color())


def print_json(document: Any) -> None:
    """A document as indented JSON, on stdout."""
    plain(json.dumps(document, ensure_ascii=False, indent=2))


def is_hangup(problem: OSError) -> bool:
    """Whether writing failed because nobody reads any more: a closed pipe, or a terminal that is gone."""
    return problem.errno in (errno.EPIPE, errno.EIO)


def _say(word: str, color: str, message: str, stream: IO[str]) -> None:
    with _unless_nobody_reads():
        click.echo(f"{click.style(f'{word}:', fg=color)} {message}", file=stream, color=_color())


def _color() -> bool | None:
    # None: click colours a terminal and leaves files alone.
    return False if os.environ.get("NO_COLOR") else None


@contextlib.contextmanager
def _unless_nobody_reads() -> Iterator[None]:
    """Stopping an experiment must go on when its terminal has gone, so words nobody can read are dropped there."""
    try:
        yield
    except OSError as problem:
        if not is_hangup(problem):
            raise


def console() -> Console:
    """Where tables and the live view go."""
    # Costs 40 ms, which only the commands that draw something pay.
    from rich.console import Console

    fixed = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return Console(highlight=False, width=None if fixed else _PIPE_COLUMNS)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> Table:
    """A table without a frame. Columns named in `right` are numbers. Text is shown as it is, brackets and all."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for position, heading in enumerate(headings):
        is_last = position == len(headings) - 1
        made.add_column(
            heading, justify="right" if heading in right else "left", no_wrap=not is_last, overflow="fold"
        )
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def clock(seconds: float) -> str:
    """A duration: 0:07, 12:34, 1:02:03."""
    minutes, second = divmod(int(max(seconds, 0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def duration(seconds: float) -> str:
    """How long something took: 0.6 s, 41.0 s, 12:34."""
    return f"{max(seconds, 0):.1f} s" if seconds < 60 else clock(seconds)


def moment(at_ms: float | None) -> str:
    """A time of this machine's zone; empty for None."""
    from datetime import datetime

    return "" if at_ms is None else f"{datetime.fromtimestamp(at_ms / 1000):%Y-%m-%d %H:%M:%S}"


def number(value: float | None) -> str:
    """A metric with the digits a person compares; empty for None."""
    return "" if value is None else f"{value:.6g}"


def parameters(values: Mapping[str, Any]) -> str:
    """Parameters on one line: lr=0.01 units=64."""
    return " ".join(f"{name}={_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
