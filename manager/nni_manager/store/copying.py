"""Copies an experiment's database row by row into a new database. Everything except the rows is ignored."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

from nni_manager.domain.remarks import Remarks
from nni_manager.errors import InternalError
from nni_manager.store.errors import StoreUnusable
from nni_manager.store.reader import StoreReader
from nni_manager.store.writer import Store
from trial_keeper.wire.messages import Stream
from trial_keeper.wire.safe_open import is_safe_name

# The year 5138, in seconds since the epoch. The limit excludes infinity, which no clock can show.
_LATEST_S = 1e11


def copy_store(
    source: Path, target: Path, *, config: str, secret: bytes, metadata_of: Callable[[str], str] = str
) -> None:
    """Create `target` with all rows of `source`, except the config and the secret.

    `metadata_of`: converts the tuner's metadata of a trial. `source` is untrusted: it is read, but nothing in it is executed,
    and ids that are no safe file names are refused.

    Raises:
        StoreUnusable: it is not the database of a terminal experiment.
    """
    with StoreReader(source) as reader:
        try:
            stored = reader.experiment()
            _check_contents(reader)
        except (ValueError, TypeError, KeyError, ArithmeticError, sqlite3.Error, InternalError) as error:
            raise _not_ours(source, f"{error!r}") from error
        Store.create(target, target.parent, stored.experiment_id, config, secret, stored.created_at_s).close()
        connection = sqlite3.connect(target, isolation_level=None)
        try:
            connection.execute("BEGIN")
            connection.execute("DELETE FROM experiment")
            for (table,) in connection.execute(
                # The copy has its own lease.
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'lease'"
            ).fetchall():
                # Table names come from our own schema.
                columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
                places = ", ".join("?" * len(columns))
                times = [column for column in columns if column.endswith("_s")]
                for row in reader.rows_of(table, columns):
                    values = dict(zip(columns, row, strict=True))
                    _check_times({column: values[column] for column in times})
                    if table == "experiment":
                        values |= {"config": config, "secret": secret}
                    if table == "trial":
                        values["metadata"] = metadata_of(values["metadata"])
                    connection.execute(f"INSERT INTO {table} VALUES ({places})", list(values.values()))
            connection.execute("COMMIT")
        except (ValueError, TypeError, sqlite3.Error) as error:
            raise _not_ours(source, str(error)) from error
        finally:
            connection.close()


def _check_times(times: dict[str, float | None]) -> None:
    for column, at_s in times.items():
        if at_s is not None and not abs(at_s) < _LATEST_S:
            raise ValueError(f"{column} has the invalid value {at_s}")


def _check_contents(reader: StoreReader) -> None:
    """Check the values that the schema does not check and that become a path or a state."""
    if not reader.experiment().state.is_terminal:
        raise ValueError("the experiment has not ended")
    trials = reader.trials()
    names = {
        name for trial in trials for name in (trial.trial_id, trial.job_id or "_", trial.run.reporter or "_")
    }
    live, ended = reader.jobs()
    for attempt in reader.attempts():
        names |= {attempt.key.trial_id, attempt.key.attempt_id, attempt.key.task or "_"}
    for name in names | set(ended) | {task for _, task, _ in reader.streams()}:
        if not is_safe_name(name):
            raise ValueError(f"{name!r} is not a valid id")
    if live or not all(trial.state.is_terminal for trial in trials):
        raise ValueError("a trial has not ended")
    for result in reader.imported():
        json.loads(result.metric)
    for remarks in (reader.remarks(), *(trial.remarks for trial in trials)):
        Remarks.of(remarks.tags, remarks.note)
    if not {stream for _, _, stream in reader.streams()} <= {stream.value for stream in Stream}:
        raise ValueError("there is an unknown stream")


def _not_ours(source: Path, why: str) -> StoreUnusable:
    return StoreUnusable(
        f"cannot use {source.name}: it is not the database of an ended experiment ({why}); save the experiment again"
    )
