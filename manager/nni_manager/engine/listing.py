"""Lists the experiments of this user from their stores, without calls to their managers."""

from typing import Any

from nni_manager.engine.profiles import stored_metadata_view
from nni_manager.errors import NniManagerError
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.registry import Registry, corrupt_entries, latest_first, served_by


def experiments_view(own: ExperimentFolder) -> list[dict[str, Any]]:
    """A line for each stored experiment, the latest first; `here` marks `own`. `url`: None if not served."""
    registry = Registry.of_user()
    folders = {folder.experiment_id: folder for folder in registry.all()} | {own.experiment_id: own}
    lines = [line for folder in folders.values() if (line := line_of(folder)) is not None]
    lines += [line | {"url": None} for line in corrupt_entries(registry)]
    return [line | {"here": line["id"] == own.experiment_id} for line in latest_first(lines)]


def line_of(folder: ExperimentFolder) -> dict[str, Any] | None:
    """The line of one experiment, without a call to its manager; None: nothing is stored."""
    line: dict[str, Any] = {"id": folder.experiment_id}
    manager = view = None
    try:
        if not folder.has_database():
            return None
        manager, view = folder.running_process(), folder.running_view()
        line |= stored_metadata_view(folder)
    except NniManagerError as error:
        # A corrupt experiment must not hide the others.
        line |= {"status": "UNREADABLE", "problem": str(error)}
    server = manager or view
    served = served_by(folder, manager, view, line.get("tags", ()))
    return line | served | {"url": None if server is None else server.base_url}
