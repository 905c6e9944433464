"""What is said to people: lines with NNI's prefixes, times, numbers, and tables."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

RULE = "-" * 84
# A pipe has no width; this one fits a log viewer and still shows the parameters of most trials on one line.
_PIPE_COLUMNS = 140
# In a narrower last column nobody could read anything; the terminal's own way of going on below is better.
_LEAST_COLUMNS = 20


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


def print_json_lines(entries: Sequence[Any]) -> None:
    """A long list as JSON with a line for each entry, on stdout: a quarter of the time that indenting takes."""
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    plain("[\n" + ",\n".join(lines) + "\n]" if lines else "[]")


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
    """Where the live view goes."""
    # Costs 40 ms, which only those pay who draw something.
    from rich.console import Console

    return Console(highlight=False)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table without a frame, on stdout. Columns named in `right` are numbers; the last one takes several lines when it must.

    Ten thousand rows cost a tenth of a second, where a library's table takes ten.
    """
    lines = _aligned(headings, rows, right)
    is_bold = sys.stdout.isatty() and _color() is None
    lines[0] = click.style(lines[0], bold=True) if is_bold else lines[0]
    # All at once: each write of its own to a terminal is a flush.
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> list[str]:
    cells = [list(headings), *([_on_one_line(cell) for cell in row] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)][:-1]
    to_the_right = [heading in right for heading in headings[:-1]]
    room = _columns() - sum(widths) - 2 * len(widths)
    lines = []
    for row in cells:
        begin = "  ".join(
            " " * (width - _width(cell)) + cell if is_right else cell + " " * (width - _width(cell))
            for cell, width, is_right in zip(row, widths, to_the_right, strict=False)
        )
        begin = begin + "  " if widths else begin
        last = row[-1]
        if len(last) <= room or room < _LEAST_COLUMNS:
            lines.append((begin + last).rstrip())
            continue
        first, *more = textwrap.wrap(last, room, break_on_hyphens=False)
        lines += [begin + first, *(" " * _width(begin) + piece for piece in more)]
    return lines


def _on_one_line(text: str) -> str:
    """What a terminal shows as it is: a trial's words may hold what would move its cursor, or change its title."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else " " if each.isspace() else repr(each)[1:-1] for each in text
    )


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    # Costs 20 ms, which only those pay who have such letters.
    from rich.cells import cell_len

    return cell_len(text)


def _columns() -> int:
    fixed = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return shutil.get_terminal_size().columns if fixed else _PIPE_COLUMNS


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
    if isinstance(value, str) or type(value) is int:
        return str(value)
    return json.dumps(value, ensure_ascii=False)
