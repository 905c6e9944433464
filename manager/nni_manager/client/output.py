"""Terminal output: lines with NNI's prefixes, times, numbers, and tables."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import click

from nni_manager.client.results import finite
from nni_manager.support.plain_text import escaped

RULE = "-" * 84
# A pipe has no width. This width fits a log viewer, and the parameters of most trials fit on one line.
_PIPE_COLUMNS = 140
# A narrower last column is unreadable; the terminal's own line wrap is better.
_MIN_COLUMNS = 20
_STREAM: ContextVar[tuple[IO[str] | None] | None] = ContextVar("stream of messages", default=None)


@contextlib.contextmanager
def messages_on(stream: IO[str] | None) -> Iterator[None]:
    """Print information and progress on this stream in place of stdout; None: nowhere."""
    token = _STREAM.set((stream,))
    try:
        yield
    finally:
        _STREAM.reset(token)


def messages() -> IO[str] | None:
    """The stream of information and progress: stdout, unless `messages_on` has replaced it."""
    replaced = _STREAM.get()
    return replaced[0] if replaced else sys.stdout


def info(message: str) -> None:
    """Print information, in a command on stdout."""
    _print_labelled("INFO", "green", message, messages())


def note(message: str) -> None:
    """Print information on stderr, where it does not mix with the output that a script reads."""
    _print_labelled("INFO", "green", message, sys.stderr)


def warning(message: str) -> None:
    """Print a warning on stderr; the command continues."""
    _print_labelled("WARNING", "yellow", message, sys.stderr)


def error(message: str) -> None:
    """Print an error on stderr, on one line."""
    _print_labelled("ERROR", "red", " ".join(message.split()), sys.stderr)


def trial_warning(trial: Mapping[str, Any]) -> None:
    """Print the warnings of a trial, if it has any."""
    for line in trial["warning"].splitlines():
        warning(f"trial {trial['id']}: {line}")


def plain(text: str = "") -> None:
    """Print a line without a prefix, in a command on stdout."""
    if (stream := messages()) is None:
        return
    with _ignore_hangup():
        click.echo(text, file=stream, color=_color())


def print_json(document: Any) -> None:
    """Print a document as indented JSON on stdout."""
    plain(_json(document, indent=2))


def print_json_lines(entries: Sequence[Any]) -> None:
    """Print a list as JSON with one entry per line on stdout. Takes a quarter of the time of indented JSON."""
    lines = list(map(_json, entries))
    plain("[\n" + ",\n".join(lines) + "\n]" if lines else "[]")


def _json(document: Any, indent: int | None = None) -> str:
    """JSON text, with null in place of NaN and infinities, which JSON does not have."""
    try:
        return json.dumps(document, ensure_ascii=False, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(finite(document), ensure_ascii=False, indent=indent)


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Name the file in an error that has no name: that of a failed write, such as to a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def is_hangup(problem: OSError) -> bool:
    """True if a write failed because the pipe or the terminal is closed."""
    return problem.errno in (errno.EPIPE, errno.EIO)


def _print_labelled(label: str, color: str, message: str, stream: IO[str] | None) -> None:
    if stream is None:
        return
    # A message may quote untrusted text of a trial or an archive.
    shown = "\n".join(map(escaped, message.split("\n")))
    with _ignore_hangup():
        click.echo(f"{click.style(f'{label}:', fg=color)} {shown}", file=stream, color=_color())


def _color() -> bool | None:
    # None: click colours output to a terminal only.
    return False if os.environ.get("NO_COLOR") else None


@contextlib.contextmanager
def _ignore_hangup() -> Iterator[None]:
    """Drop output if the terminal is closed, so that a stop of an experiment still completes."""
    try:
        yield
    except OSError as problem:
        if not is_hangup(problem):
            raise


def print_list(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table as `print_table`, or tab-separated lines for other programs if stdout is a pipe or a file."""
    if sys.stdout.isatty():
        print_table(headings, rows, right)
        return
    sys.stdout.write("".join("\t".join(map(_on_one_line, row)) + "\n" for row in (headings, *rows)))
    sys.stdout.flush()


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table without a frame on stdout. Columns named in `right` are right-aligned; the last column wraps if necessary.

    Ten thousand rows take 0.1 s; with a library's table they take 10 s.
    """
    lines = _aligned(headings, rows, right)
    is_bold = sys.stdout.isatty() and _color() is None
    lines[0] = click.style(lines[0], bold=True) if is_bold else lines[0]
    # One write: each write to a terminal flushes.
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> list[str]:
    cells = [list(headings), *([_on_one_line(cell) for cell in row] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)][:-1]
    to_the_right = [heading in right for heading in headings[:-1]]
    room = _columns() - sum(widths) - 2 * len(widths)
    lines = []
    for row in cells:
        begin = "".join(
            (" " * (width - _width(cell)) + cell if is_right else cell + " " * (width - _width(cell))) + "  "
            for cell, width, is_right in zip(row, widths, to_the_right, strict=False)
        )
        last = row[-1]
        if len(last) <= room or room < _MIN_COLUMNS:
            lines.append((begin + last).rstrip())
            continue
        first, *more = textwrap.wrap(last, room, break_on_hyphens=False, break_long_words=False)
        lines += [begin + first, *(" " * _width(begin) + piece for piece in more)]
    return lines


def _on_one_line(text: str) -> str:
    """The text without control characters: text of a trial could move the terminal's cursor, or change its title."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else " " if each.isspace() else repr(each)[1:-1] for each in text
    )


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    # Imported here: the import takes 20 ms, and only non-ASCII text needs it.
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
    """A duration with a unit: 0.6 s, 41.0 s, 12:34."""
    return f"{max(seconds, 0):.1f} s" if seconds < 60 else clock(seconds)


def moment(at_ms: float | None) -> str:
    """A time in this machine's time zone; empty for None."""
    from datetime import datetime

    return "" if at_ms is None else f"{datetime.fromtimestamp(at_ms / 1000):%Y-%m-%d %H:%M:%S}"


def number(value: float | None) -> str:
    """A metric with six significant digits; empty for None."""
    return "" if value is None else f"{value + 0.0:.6g}"  # without the sign of -0.0


def parameters(values: Mapping[str, Any]) -> str:
    """Parameters on one line: lr=0.01 units=64. A nested choice is its name and its own parameters: optimizer=adam beta=0.9."""
    return " ".join(f"{path[-1]}={short(value)}" for path, value in flat_parameters(values))


def flat_parameters(
    values: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield paths, from the outside in, and values. A nested choice is its name, followed by its own parameters."""
    for name, value in values.items():
        path = (*above, name)
        if isinstance(value, dict) and "_name" in value:
            yield path, value["_name"]
            yield from flat_parameters({key: each for key, each in value.items() if key != "_name"}, path)
        else:
            yield path, value


def short(value: Any) -> str:
    """A value of a parameter; floats have six significant digits, also within lists and dicts."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str) or type(value) is int:
        return str(value)
    return json.dumps(_rounded(value), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    match value:
        case float() if math.isfinite(value):
            return float(number(value))
        case list():
            return [_rounded(each) for each in value]
        case dict():
            return {name: _rounded(each) for name, each in value.items()}
    return value
