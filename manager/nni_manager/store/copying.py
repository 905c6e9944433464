"""An experiment's database as a new one: row by row into tables of our own making. Whatever else is in the file stays there."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

from nni_manager.errors import Bug
from nni_manager.store.store import Store, StoreReader, StoreUnusable
from trial_keeper.wire.messages import Stream
from trial_keeper.wire.workspace import is_safe_name


def copy_store(
    source: Path, target: Path, *, config: str, secret: bytes, memo_of: Callable[[str], str] = str
) -> None:
    """Make `target` of all that is in `source`, but for the config and the secret. `memo_of`: what becomes of a tuner's note.

    `source` may be anybody's: it is read, nothing of it is run, and ids that could lead out of a folder are refused.

    Raises:
        StoreUnusable: it is no database of an experiment that is over.
    """
    with StoreReader(source) as reader:
        try:
            stored = reader.experiment()
            _refuse_unless_over(reader)
        except (ValueError, TypeError, KeyError, ArithmeticError, sqlite3.Error, Bug) as error:
            raise _not_ours(source, f"{error!r}") from error
        Store.create(target, target.parent, stored.experiment_id, config, secret, stored.created_at_s).close()
        connection = sqlite3.connect(target, isolation_level=None)
        try:
            connection.execute("BEGIN")
            connection.execute("DELETE FROM experiment")
            for (table,) in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table'"
            ).fetchall():
                # The names are those of our own schema.
                columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
                places = ", ".join("?" * len(columns))
                for row in reader.rows_of(table, columns):
                    values = dict(zip(columns, row, strict=True))
                    if table == "experiment":
                        values |= {"config": config, "secret": secret}
                    if table == "trial":
                        values["memo"] = memo_of(values["memo"])
                    connection.execute(f"INSERT INTO {table} VALUES ({places})", list(values.values()))
            connection.execute("COMMIT")
        except (ValueError, TypeError, sqlite3.Error) as error:
            raise _not_ours(source, str(error)) from error
        finally:
            connection.close()


def _refuse_unless_over(reader: StoreReader) -> None:
    """What is asked of each row beyond what the schema asks: all that becomes a path or a state."""
    if not reader.experiment().state.is_over:
        raise ValueError("the experiment is not over")
    trials = reader.trials()
    names = {
        name for trial in trials for name in (trial.trial_id, trial.job_id or "_", trial.reporter or "_")
    }
    live, ended = reader.jobs()
    for name in names | set(ended) | {task for _, task, _ in reader.streams()}:
        if not is_safe_name(name):
            raise ValueError(f"{name!r} is no id")
    if live or not all(trial.state.is_final for trial in trials):
        raise ValueError("a trial is not over")
    for result in reader.imported():
        json.loads(result.metric)
    if not all(isinstance(trial.first_attempts, dict) for trial in trials):
        raise ValueError("what attempts count is no JSON object")
    if not {stream for _, _, stream in reader.streams()} <= {stream.value for stream in Stream}:
        raise ValueError("there is an unknown stream")


def _not_ours(source: Path, why: str) -> StoreUnusable:
    return StoreUnusable(
        f"cannot use {source.name}: it is no database of an experiment that is over ({why}); save the experiment again"
    )
