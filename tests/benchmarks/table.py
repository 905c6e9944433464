"""The table of measurements: each beside its floor from the same run, and its goal."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Row:
    """One measurement. `floor` is the minimum for any program, `ratio` is relative to it; `holds`: the
    goal is met.
    """

    what: str
    measured: str
    floor: str
    ratio: str
    goal: str
    holds: bool


def render(rows: list[Row]) -> str:
    """The rows as an aligned plain-text table, with a header and a last column that says yes or NO."""
    table = [("what", "measured", "floor", "ratio", "goal", "holds")]
    table += [(*astuple(row)[:5], "yes" if row.holds else "NO") for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )
