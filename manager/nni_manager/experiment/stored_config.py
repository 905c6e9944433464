"""Changes the configuration of a stored experiment before it is resumed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

from nni_manager.client.experiments import KnownExperiment
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.python_document import read_python_service_keys
from nni_manager.experiment.config import ExperimentConfig
from nni_manager.training_services.platform import platform_of


def change(known: KnownExperiment, changed: Callable[[ExperimentSpec], ExperimentSpec]) -> None:
    """Store another configuration of an experiment that does not run.

    Raises:
        UserError: another process has just become its owner.
        RetryableError: the database cannot be written now.
    """
    from nni_manager.store.rows import config_row
    from nni_manager.store.writer import Store

    folder = known.folder
    with (
        folder.owned(is_brief=True) as lease,
        closing(Store(folder.database, folder.collected_logs, lease)) as store,
    ):
        store.commit([config_row(changed(known.stored.config()).to_json())], time.time())


def store_login(known: KnownExperiment, config: ExperimentConfig | None) -> None:
    """Let the next manager of a stored experiment use the login of `config`; no effect without one.

    Only the login is read, so other parts of `config` may be wrong.

    Raises:
        ConfigInvalid, UserError: the login is invalid, or is for another user or cluster.
        UserError, RetryableError: see `change`.
    """
    if config is None:
        return
    spec = known.stored.config()
    section = platform_of(spec).section_with_login(partial(read_python_service_keys, config.document()))
    if section != spec.cluster:
        change(known, lambda spec: spec.replace(cluster=section))
