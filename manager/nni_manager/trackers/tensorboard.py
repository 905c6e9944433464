"""Export to TensorBoard: a folder of event files for each trial, with its parameters for the HParams tab."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from nni_manager.domain.trial import TrialState
from nni_manager.errors import UserError
from nni_manager.trackers.source import Run, Source

_EVENT_FILES = "events.out.tfevents.*"
_SUCCEEDED = (TrialState.SUCCEEDED, TrialState.EARLY_STOPPED)


def export(source: Source, runs: Iterable[Run], target: str) -> None:
    """Write the runs below `target`, in place of those of an earlier export.

    Raises:
        UserError: a folder with the name of a run has other files.
        OSError: `target` cannot be written.
    """
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"experiment-{source.experiment_id}", [_columns(source)])
    for run in runs:
        _write(folder / run.name, _events(run))


def _write(folder: Path, events: Iterable[Event]) -> None:
    """Write the event files of a folder, and then put it in the place of an earlier one."""
    if folder.exists() and len(list(folder.iterdir())) != len(list(folder.glob(_EVENT_FILES))):
        raise UserError(
            f"cannot replace {folder}: it has files other than TensorBoard's; remove it, or choose another folder"
        )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as partial:
        written = Path(partial, folder.name)
        writer = EventFileWriter(str(written))
        for event in events:
            writer.add_event(event)
        writer.close()
        if folder.exists():
            shutil.rmtree(folder)
        written.rename(folder)


def _events(run: Run) -> Iterator[Event]:
    summary = summary_v2.hparams_pb(
        {name: _hparam(value) for name, value in run.parameters.items()},
        trial_id=run.trial_id,
        start_time_secs=run.started_at_s,
    )
    yield Event(wall_time=run.started_at_s, summary=summary)
    for point in run.points():
        yield Event(wall_time=point.time_s, step=point.step, summary=_scalars(point.values))
    if not run.state.is_terminal:
        return
    final = {f"final/{name}": value for name, value in run.final.items()}
    yield Event(wall_time=run.end_s, summary=_scalars(final))
    status = api_pb2.STATUS_SUCCESS if run.state in _SUCCEEDED else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=run.end_s)
    value = Summary.Value(
        tag=metadata.SESSION_END_INFO_TAG,
        metadata=metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end)),
        tensor=metadata.NULL_TENSOR,
    )
    yield Event(wall_time=run.end_s, summary=Summary(value=[value]))


def _columns(source: Source) -> Event:
    """The columns of the HParams tab."""
    names = dict.fromkeys(name for run in source.runs for name in run.parameters)
    summary = summary_v2.hparams_config_pb(
        [summary_v2.HParam(name) for name in names],
        [summary_v2.Metric(f"final/{metric}", display_name=metric) for metric in source.metrics],
    )
    return Event(summary=summary)


def _scalars(values: Mapping[str, float]) -> Summary:
    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])


def _hparam(value: Any) -> bool | float | str:
    """A value of a type that the HParams tab has; others as text, also an integer beyond floats."""
    is_large = isinstance(value, int) and abs(value) > sys.float_info.max
    return value if isinstance(value, bool | int | float | str) and not is_large else f"{value}"
