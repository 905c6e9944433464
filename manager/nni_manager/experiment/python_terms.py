"""Messages of the other parts of the manager in the terms of the Python API: fields and methods in place of keys and commands."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.python_document import to_python_names
from nni_manager.errors import NniManagerError

_TERMS = {
    r"--port N or --port auto": 'port=N or port="auto"',
    r"--port (N|\d+)": r"port=\1",
    "--url-prefix": "url_prefix",
    "--tls-certificate": "tls_certificate",
    "--tls-key": "tls_key",
    r"`nnictl resume (\w+)( --foreground)?`": r"Experiment.resume('\1')",
    r"trial_gpu_number, or trialGpuNumber": "trial_gpu_number",  # the keys of both schemas
}
_OBJECTIVE = re.compile(
    r"name the metric in the experiment file, such as objectives: \[\{metric: (.*), mode: (\w+)\}\] \(or (\w+)\)"
)


def in_python(message: str) -> str:
    """A message with Python's fields, arguments and methods."""
    message = to_python_names(message)
    for term, replacement in _TERMS.items():
        message = re.sub(term, replacement, message)
    return of_result(message)


def of_result(message: str) -> str:
    """A message about a trial, which may quote the trial's own text: only its remedy for a result is replaced."""
    return _OBJECTIVE.sub(
        r'name the metric, such as objectives=[{"metric": \1, "mode": "\2"}] (or "\3")', message
    )


def summary_in_python(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """A summary of the experiment with the remedies of Python."""
    trial = summary["latestWithoutResult"]
    if trial is None:
        return summary
    return {**summary, "latestWithoutResult": {**trial, "message": of_result(trial["message"])}}


@contextlib.contextmanager
def in_python_terms() -> Iterator[None]:
    """Translate errors: the same error, so that its traceback has no second one."""
    try:
        yield
    except ConfigInvalid:
        raise  # its keys are translated already
    except NniManagerError as error:
        error.args = (in_python(str(error)),)
        raise
