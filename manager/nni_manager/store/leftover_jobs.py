"""The ended jobs of an experiment that may be left on its cluster: a file in its folder, which its manager writes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from nni_manager.store.folders import ExperimentFolder, FolderUnreadable
from trial_keeper.wire.small_files import replace_file


def read(folder: ExperimentFolder) -> dict[str, str]:
    """For each job id what may be left, with the command that removes it; empty if nothing is known to be left.

    Raises:
        FolderUnreadable: there is a file that cannot be read.
    """
    path = folder.leftover_jobs
    try:
        found = {str(job_id): str(message) for job_id, message in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise FolderUnreadable(
            f"cannot read {path}: {why}; look for jobs of {folder.experiment_id} on its cluster, then remove the file"
        ) from error
    return found


def write(folder: ExperimentFolder, leftovers: Mapping[str, str]) -> None:
    """Replace what is known; without leftovers there is no file.

    Raises:
        OSError: the disk refuses it.
    """
    if leftovers:
        replace_file(folder.leftover_jobs, json.dumps(leftovers).encode(), 0o600)
    else:
        folder.leftover_jobs.unlink(missing_ok=True)
