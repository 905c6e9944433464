"""Displays the progress of an experiment in a notebook, and prints its manager's log as it grows."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path
from typing import Any

from nni_manager.client.watch import Summary, draw

# Each update is sent to the browser; one per second is enough.
NOTEBOOK_INTERVAL_S = 1.0
_RETRY_DELAY_S = 0.5
_COLUMNS = 100


def is_in_notebook() -> bool:
    """True in a Jupyter kernel, which displays objects instead of terminal output."""
    ipython = sys.modules.get("IPython")  # a kernel has imported IPython already
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookView:
    """A progress display for notebooks: one cell output that is updated while the experiment runs."""

    def __init__(self) -> None:
        self._shown: Any = None

    def show(self, summary: Summary) -> None:
        """Create or update the output."""
        from importlib import import_module

        picture = _Picture(summary)
        if self._shown is None:
            self._shown = import_module("IPython.display").display(picture, display_id=True)
        else:
            self._shown.update(picture)


class _Picture:
    """A summary as HTML and as text; the notebook chooses one."""

    def __init__(self, summary: Summary) -> None:
        from rich.console import Console

        console = Console(
            file=io.StringIO(), record=True, width=_COLUMNS, force_jupyter=False, highlight=False
        )
        console.print(draw(summary))
        self._html = console.export_html(
            clear=False, inline_styles=True, code_format="<pre style='line-height:1.3'>{code}</pre>"
        )
        self._text = console.export_text().rstrip()

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text


class LogTail:
    """Prints the new lines of a log on stdout until `close`."""

    def __init__(self, path: Path) -> None:
        """Start at the current end of the log."""
        self._path = path
        self._must_end = threading.Event()
        self._offset = path.stat().st_size if path.exists() else 0
        self._thread = threading.Thread(target=self._follow, name="log of the manager", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Print the remaining complete lines and stop."""
        self._must_end.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._must_end.wait(_RETRY_DELAY_S):
            self._print_new_lines()
        self._print_new_lines()

    def _print_new_lines(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as log:
            log.seek(self._offset)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        sys.stdout.write(whole.decode(errors="replace"))
        sys.stdout.flush()
