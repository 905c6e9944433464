"""Exports of an experiment to experiment trackers: MLflow, TensorBoard and W&B, each written with its own library.

Import the modules late: a library may be missing, and its import may take seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from nni_manager.errors import UserError

if TYPE_CHECKING:
    from nni_manager.trackers.source import Run, Source

TRACKERS = {"mlflow": "MLflow", "tensorboard": "TensorBoard", "wandb": "W&B"}
"""The trackers' names, by the name of the module and of the extra that installs the library."""
# An export sends nothing but the experiment, and only to the given server: no use statistics and no error reports.
# MLflow's own 7 retries of a request take more than four minutes without a message, 3 take 12 s; a repeated export continues.
_ENVIRON = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "WANDB_ERROR_REPORTING": "false",
}

_LOGIN = re.compile(r"(?<=://)[^/@\s]*@")

Export: TypeAlias = "Callable[[Source, Iterable[Run], str], None]"
"""Writes runs of an experiment to a folder, or to the server at a URI."""


class TrackerMissing(UserError):
    """cannot export to a tracker: its library is not installed; install it with pip"""


def exporter(kind: str) -> Export:
    """The export to a tracker, a key of `TRACKERS`.

    Raises:
        TrackerMissing: its library, or a part of it, is not installed.
    """
    for name, value in _ENVIRON.items():
        os.environ.setdefault(name, value)
    try:
        export: Export = import_module(f"nni_manager.trackers.{kind}").export
    except ModuleNotFoundError as error:
        package = (error.name or kind).partition(".")[0]
        raise TrackerMissing(
            f"cannot export to {TRACKERS[kind]}: the package {package} is not installed; run "
            f"`pip install 'trial-keeper[{kind}]'`"
        ) from error
    return export


def without_logins(text: str) -> str:
    """The text with its URIs shortened by user and password."""
    return _LOGIN.sub("", text)
