"""Reads and changes the tags and notes of an experiment: over its manager, or, if none runs, in its store.

Import this module late: most commands do not need SQLite.
"""

from __future__ import annotations

import time
from contextlib import closing

from nni_manager.client.experiments import KnownExperiment
from nni_manager.domain.remarks import Remarks, RemarksChange
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import remarks_row
from nni_manager.store.writer import Store


def remarks_of(known: KnownExperiment, trial_id: str | None = None) -> Remarks:
    """The remarks of a trial, which must exist; `trial_id` None: of the experiment."""
    if known.problem:  # the store is unreadable
        document = known.get("/summary") if trial_id is None else known.trial(trial_id)
        return Remarks(tuple(document["tags"]), document["note"])
    return known.stored.read(lambda reader: reader.remarks(trial_id))


def change_remarks(known: KnownExperiment, change: RemarksChange, trial_id: str | None = None) -> Remarks:
    """Change the remarks of a trial, which must exist, and return the new ones; `trial_id` None: of the experiment.

    They are durable then. Without a manager, this process owns the experiment meanwhile, and an older database is migrated.

    Raises:
        UserError: the change is not possible, or another process has just become the experiment's owner.
        RetryableError: the manager does not answer, or the database cannot be written now.
    """
    client = known.client()
    if client is not None:
        names = () if trial_id is None else ("trials", trial_id)
        changed = client.patch("", *names, "remarks", document=change.to_json())
        return Remarks(tuple(changed["tags"]), changed["note"])
    folder = known.folder
    with (
        folder.owned(is_brief=True) as lease,
        closing(Store(folder.database, folder.collected_logs, lease)) as store,
    ):
        with StoreReader(folder.database) as reader:
            before = reader.remarks(trial_id)
        after = change.applied_to(before)
        if after != before:
            store.commit([remarks_row(trial_id, after)], time.time())
    return after
