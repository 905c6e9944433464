"""Export to W&B: an offline directory, which `wandb sync` uploads, with a run for each trial.

Nothing is sent. A repeated export writes only the runs that had not ended in the last one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import wandb

from nni_manager.domain.trial import TrialState
from nni_manager.errors import RetryableError
from nni_manager.trackers.source import Run, Source

_COMPLETE = "trial-keeper-complete"
"""A file in the folder of a run that is written whole: the trial had ended."""
# Neither the machine that exports nor this program is what the runs are about.
_SETTINGS = wandb.Settings(
    silent=True,
    console="off",
    disable_git=True,
    disable_code=True,
    save_code=False,
    x_disable_meta=True,
    x_disable_machine_info=True,
    x_disable_stats=True,
)


# W&B refuses these characters in the name of a project, and longer names.
_REFUSED = re.compile(r"[/\\#?%:]")
_MAX_NAME = 128


class RunMissing(RetryableError):
    """cannot export to W&B: it has not written a run; repeat the command, which continues"""


def export(source: Source, runs: Iterable[Run], target: str) -> None:
    """Write the runs to `target`/wandb, in the project with the experiment's name and a group with its id.

    Raises:
        RunMissing: W&B has not written a run, or refuses it.
        OSError: `target` cannot be written.
    """
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[tuple[Path, bool]] = []
    try:
        for run in runs:
            # W&B's ids are those of a project, in which several experiments may have the same name.
            run_id = f"{source.experiment_id}-{run.trial_id}"
            earlier = list(folder.glob(f"wandb/offline-run-*-{run_id}"))
            if any((each / _COMPLETE).exists() for each in earlier):
                continue
            for each in earlier:
                shutil.rmtree(each)
            written.append((_write(source, run, run_id, folder), run.state.is_terminal))
    except wandb.Error as error:
        raise RunMissing(f"cannot export to W&B: {error}; repeat the command, which continues") from error
    finally:
        # Only this waits until W&B's own process has written the files.
        wandb.teardown()
    for path, has_ended in written:
        if not any(each.stat().st_size for each in path.glob("*.wandb")):
            raise RunMissing(
                f"cannot export to W&B: it has not written {path}; repeat the command, which continues"
            )
        if has_ended:
            (path / _COMPLETE).touch()


def _write(source: Source, run: Run, run_id: str, folder: Path) -> Path:
    """Write a run; returns its folder."""
    written = wandb.init(
        mode="offline",
        project=_REFUSED.sub("_", source.name)[:_MAX_NAME],
        group=source.experiment_id,
        id=run_id,
        name=run.name,
        dir=str(folder),
        config=dict(run.parameters),
        tags=list(run.tags),
        notes=run.note,
        settings=_SETTINGS,
        reinit="create_new",
    )
    try:
        for point in run.points():
            written.log({**point.values, "_timestamp": point.time_s}, step=point.step)
        if run.state.is_terminal:
            written.summary.update({f"final/{name}": value for name, value in run.final.items()})
        written.summary["state"] = run.state.value
    finally:
        written.finish(exit_code=1 if run.state is TrialState.FAILED else 0)
    return Path(written.dir).parent
