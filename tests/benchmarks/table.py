"""The table of measurements: each compared with its floor from the same run, and its goal."""

import re
from dataclasses import dataclass

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Row:
    """One measurement. `floor` is the minimum for any program, `ratio` is relative to it; `holds`: the goal is met. `probe`: the
    times of bare programs before and after the measurement.
    """

    what: str
    measured: str
    floor: str
    ratio: str
    goal: str
    holds: bool
    probe: str = ""

    @property
    def figure(self) -> float | None:
        """The number to compare with another run: the ratio to the floor if there is one, otherwise the measured value.

        None if neither is a number.
        """
        found = _NUMBER.match(self.ratio) if self.ratio.endswith(" x") else _NUMBER.match(self.measured)
        return float(found[0].replace(",", "")) if found else None


def render(rows: list[Row]) -> str:
    """The rows as an aligned plain-text table, with a header and a column that says yes or NO."""
    head = ("what", "measured", "floor", "ratio", "goal", "holds", "beside it")
    cells = [
        (row.what, row.measured, row.floor, row.ratio, row.goal, "yes" if row.holds else "NO", row.probe)
        for row in rows
    ]
    return aligned(
        [head, *cells] if any(row.probe for row in rows) else [line[:-1] for line in (head, *cells)]
    )


def aligned(table: list[tuple[str, ...]]) -> str:
    """Lines of cells, the first of which is the header, as an aligned plain-text table."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [table[0], tuple("-" * width for width in widths), *table[1:]]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
