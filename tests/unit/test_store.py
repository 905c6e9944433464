"""The experiment's store: commits, queries, locks, leases and migrations."""

import contextlib
import errno
import json
import os
import sqlite3
import tempfile
import threading
import time
from pathlib import Path

import pytest
from another_user import as_another_user
from attempts import RegisteringStore, attempt_id, metrics_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.ingest import StreamWrite
from nni_manager.domain.provenance import CodeVersion
from nni_manager.domain.remarks import NO_REMARKS, Remarks
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from nni_manager.domain.usage import PeakUsage
from nni_manager.errors import InternalError
from nni_manager.store import writer as writer_module
from nni_manager.store.errors import StoreBusy, StoreUnusable, wal_bytes
from nni_manager.store.lease import LeaseLost
from nni_manager.store.migrations import SCHEMA_VERSION
from nni_manager.store.queries import QUERIES
from nni_manager.store.reader import ROWS_OF_A_PAGE, StoreReader
from nni_manager.store.rows import (
    UsageRow,
    attempt_row,
    code_row,
    environment_row,
    experiment_row,
    packages_row,
    remarks_row,
    trial_row,
)
from nni_manager.store.writer import Store, log_path
from nni_sdk.records import decode, encode
from trial_keeper.wire.messages import AttemptKey, Environment, GpuUsage, Stream, Usage
from trial_keeper.wire.reasons import ExitReason

KEY = AttemptKey("aBcDe", attempt_id(0), "main-0")


@pytest.fixture
def database(tmp_path):
    return tmp_path / "experiment.sqlite"


@pytest.fixture
def store(database, tmp_path):
    store = RegisteringStore.create(database, tmp_path / "logs", "EXPERIMT", "{}", b"secret", 12.5)
    yield store
    store.close()


@pytest.fixture
def reader(store, database):
    with StoreReader(database) as reader:
        yield reader


def a_trial(run=None, **fields):
    values = {"trial_id": KEY.trial_id, "sequence_id": 0, "parameters": {"x": 1.5}, "metadata": {"x": 0.5}}
    values |= {"created_at_s": 1.0, "job_id": KEY.trial_id} | fields
    return Trial(**values, run=TrialRun(**{"attempt": 0, "reporter": KEY.task} | (run or {})))


def a_commit(*values, offset=0, key=KEY):
    data = b"".join(encode(0, key.trial_id, "PERIODICAL", i, value) for i, value in enumerate(values))
    return StreamWrite(
        key, Stream.METRICS, offset, offset + len(data), records=tuple(decode(data, offset).records)
    )


def test_records_and_their_offset_are_stored_together(store, reader):
    commit = a_commit(0.5, 0.25)
    store.commit([trial_row(a_trial()), commit], 3.0)
    assert [json.loads(row.value) for row in metrics_of(reader, KEY.trial_id)] == [0.5, 0.25]
    assert reader.offsets(KEY) == {Stream.METRICS: commit.new_offset}


def test_the_peak_usage_of_a_trial_is_stored_with_the_trial(store, reader):
    peak = PeakUsage(150.5, 2**40, 2**41, (GpuUsage(0, 99.0, 2**34),))
    store.commit([trial_row(a_trial())], 1.0)
    assert reader.trials()[0].run.peak_usage is None
    store.commit([trial_row(a_trial({"peak_usage": peak}))], 2.0)
    assert reader.trials()[0].run.peak_usage == peak


def test_usage_samples_of_a_trial_are_stored_in_order(store, reader):
    gpu = GpuUsage(1, 50.0, 2**30)
    samples = [UsageRow(Usage(KEY, 12.5 * n, 1000 * n, 10 * n, (gpu,) * n), 5.0 * n) for n in range(3)]
    store.commit([trial_row(a_trial()), *samples], 1.0)
    store.commit(samples[2:], 2.0)
    assert reader.usage_of(KEY.trial_id) == [(0, sample) for sample in samples]
    assert reader.usage_of("other") == []


def test_the_environment_of_an_attempt_is_stored_with_one_copy_of_its_package_list(store, reader):
    digest, text = "ab" * 32, "a==1\nb==2\n"
    here = Environment("host-1", "node-1", "3.11.2", digest)
    store.commit(
        [
            trial_row(a_trial()),
            attempt_row(KEY, 0),
            environment_row(KEY, here),
            packages_row(digest, text),
        ],
        1.0,
    )
    store.commit([packages_row(digest, "ignored"), attempt_row(KEY, 0, is_lost=True)], 2.0)
    (found,) = reader.environments()[KEY.trial_id]
    assert (found.attempt, found.task, found.host, found.node) == (0, KEY.task, "host-1", "node-1")
    assert (found.python, reader.packages(found.packages)) == ("3.11.2", ["a==1", "b==2"])
    assert (reader.packages("unknown"), reader.package_digests()) == (None, [digest])
    assert reader.environments("other") == {}


def test_code_versions_are_stored_in_chronological_order(store, reader):
    versions = [
        CodeVersion(1.0, "aa"),
        CodeVersion(2.0, "", "c0ffee", True),
        CodeVersion(3.0, "bb", "c0ffee", False),
    ]
    store.commit([code_row(each) for each in reversed(versions)], 1.0)
    assert reader.code() == versions


def test_usage_samples_keep_their_order_after_the_clock_was_set_back(store, reader):
    samples = [
        UsageRow(Usage(KEY, float(n), 0, 0), at_s) for n, at_s in enumerate((86400.0, 86405.0, 5.0, 10.0))
    ]
    for sample in samples:
        store.commit([sample], 1.0)
    stored = [sample for _, sample in reader.usage_of(KEY.trial_id)]
    assert [sample.usage.cpu_percent for sample in stored] == [0.0, 1.0, 2.0, 3.0]
    assert [sample.at_s for sample in stored] == pytest.approx([86400, 86405, 86405.001, 86405.002])


@given(
    st.lists(st.text(max_size=5), max_size=3),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_remarks_are_stored_unchanged_and_separately_from_trial_rows(store, reader, tags, note):
    ours, its = Remarks((), note), Remarks(tuple(tags), note)
    store.commit([trial_row(a_trial()), remarks_row(None, ours), remarks_row(KEY.trial_id, its)], 1.0)
    store.commit([trial_row(a_trial({"message": "later"}))], 2.0)
    (trial,) = reader.trials()
    assert (reader.experiment().remarks, trial.remarks, trial.run.message) == (ours, its, "later")
    assert (reader.trial(KEY.trial_id).remarks, reader.trial_list()[0]["remarks"]) == (its, its)
    assert (reader.remarks(), reader.remarks(KEY.trial_id), reader.remarks("other")) == (
        ours,
        its,
        NO_REMARKS,
    )


def test_a_duplicate_record_rolls_back_the_whole_transaction(store, reader):
    store.commit([trial_row(a_trial()), a_commit(1)], 1.0)
    offset = reader.offsets(KEY)[Stream.METRICS]
    with pytest.raises(InternalError):
        store.commit([a_commit(2, offset=offset), a_commit(1)], 2.0)
    assert len(metrics_of(reader, KEY.trial_id)) == 1
    assert reader.offsets(KEY)[Stream.METRICS] == offset
    # After the rollback, the store must accept the first write of the failed transaction.
    store.commit([a_commit(2, offset=offset)], 3.0)
    assert len(metrics_of(reader, KEY.trial_id)) == 2


def test_commits_of_any_length_are_stored_completely_and_in_order(store, reader):
    lengths = {0, 1, 2, 1000, *(rows + more for rows in writer_module.ROWS_AT_ONCE for more in (-1, 0, 1))}
    trials = [a_trial(trial_id=f"t{length}", sequence_id=length) for length in lengths]
    commits = [
        a_commit(*range(length), key=AttemptKey(f"t{length}", attempt_id(0), KEY.task))
        for length in lengths
        if length
    ]
    store.commit([*map(trial_row, trials), *commits], 1.0)
    for length in lengths:
        rows = metrics_of(reader, f"t{length}")
        assert [(row.sequence, row.value) for row in rows] == [(value, str(value)) for value in range(length)]
        assert {(row.parameter_id, row.is_final, row.stored_at_s) for row in rows} <= {("0", False, 1.0)}


def test_every_record_of_a_commit_keeps_its_type_and_its_parameter_id(store, reader):
    kinds = [
        (0, "PERIODICAL"),
        (0, "PERIODICAL"),
        (1, "PERIODICAL"),
        ("1", "PERIODICAL"),
        ("1", "FINAL"),
        (0, "PERIODICAL"),
    ]
    data = b"".join(
        encode(parameter_id, KEY.trial_id, type_, number, number)
        for number, (parameter_id, type_) in enumerate(kinds)
    )
    write = StreamWrite(KEY, Stream.METRICS, 0, len(data), records=tuple(decode(data, 0).records))
    store.commit([trial_row(a_trial()), write], 1.0)
    rows = metrics_of(reader, KEY.trial_id)
    assert [(row.sequence, json.loads(row.parameter_id), row.is_final) for row in rows] == [
        (number, parameter_id, type_ == "FINAL") for number, (parameter_id, type_) in enumerate(kinds)
    ]


def test_only_the_records_of_the_newest_attempt_are_returned(store, reader):
    second = AttemptKey(KEY.trial_id, attempt_id(1), KEY.task)
    store.commit([trial_row(a_trial({"attempt": 1})), a_commit(1, 2, 3), a_commit(7, key=second)], 1.0)
    assert [row.value for row in metrics_of(reader, KEY.trial_id)] == ["7"]
    assert [row.value for row in reader.metrics()] == ["7"]


def test_records_can_be_selected_by_type_and_range(store, reader):
    other = AttemptKey("fGhIj", attempt_id(0), "main-0")
    final = encode(0, other.trial_id, "FINAL", 0, {"default": 1})
    store.commit(
        [
            trial_row(a_trial()),
            trial_row(a_trial(trial_id=other.trial_id, sequence_id=1)),
            a_commit(1, 2),
            StreamWrite(other, Stream.METRICS, 0, len(final), records=tuple(decode(final, 0).records)),
        ],
        1.0,
    )
    assert [row.value for row in reader.metrics(is_final=True)] == ['{"default": 1}']
    assert [row.value for row in reader.metrics(is_final=False)] == ["1", "2"]
    assert [row.trial_id for page in reader.metric_pages(None, 1, 1) for row in page] == [other.trial_id]
    assert [row.value for row in reader.latest_intermediates()] == ["2"]


def test_the_lowest_and_highest_result_exclude_failed_trials_and_trials_without_a_number(store, reader):
    values = [
        (TrialState.SUCCEEDED, 0.5),
        (TrialState.USER_CANCELED, 0.25),
        (TrialState.SUCCEEDED, 2.0),
        (TrialState.EARLY_STOPPED, None),
        (TrialState.FAILED, 9.0),
    ]
    trials = [
        a_trial({"value": value}, trial_id=f"trial{number}", sequence_id=number, state=state)
        for number, (state, value) in enumerate(values)
    ]
    store.commit([trial_row(trial) for trial in trials], 1.0)
    totals = reader.trial_totals()
    assert totals.counts == {
        TrialState.SUCCEEDED: 2,
        TrialState.USER_CANCELED: 1,
        TrialState.EARLY_STOPPED: 1,
        TrialState.FAILED: 1,
    }
    assert (totals.lowest, totals.highest) == (0.25, 2.0)


def test_a_stored_trial_is_read_back_unchanged(store, reader):
    run = {"started_at_s": 2.0, "ended_at_s": 3.0, "reason": ExitReason.SIGNAL, "exit_code": 137}
    run |= {"message": "last words", "final": "NaN"}
    trial = a_trial(run, state=TrialState.FAILED, stop_reason=ExitReason.STOPPED_BY_USER)
    store.commit([trial_row(a_trial())], 1.0)
    store.commit([trial_row(trial)], 1.0)
    assert reader.trials() == [trial]


def test_a_row_does_not_change_if_its_trial_changes_after_the_row_was_created(store, reader):
    trial = a_trial()
    row = trial_row(trial)
    trial.state = TrialState.RUNNING
    store.commit([row], 1.0)
    assert reader.trials()[0].state is TrialState.WAITING


def test_a_stored_experiment_is_read_back_unchanged(store, reader):
    store.commit([experiment_row(ExperimentState.ERROR, "why", 4.5, 9.0, any_compatible_keeper=True)], 1.0)
    stored = reader.experiment()
    assert (stored.state, stored.error, stored.active_s) == (ExperimentState.ERROR, "why", 4.5)
    assert (stored.ended_at_s, stored.any_compatible_keeper, stored.secret) == (9.0, True, b"secret")


def test_half_a_surrogate_pair_in_a_message_is_stored_as_an_escape(store, reader):
    store.commit([trial_row(a_trial({"message": "cannot read caf\udce9.png ✓"})), a_commit(0.5)], 1.0)
    assert reader.trials()[0].run.message == "cannot read caf\\udce9.png ✓"
    assert len(metrics_of(reader, KEY.trial_id)) == 1


def test_log_bytes_that_are_committed_twice_are_stored_once_at_their_offsets(store, tmp_path, reader):
    pieces = [
        StreamWrite(KEY, Stream.STDOUT, 0, 5, data=b"hello"),
        StreamWrite(KEY, Stream.STDOUT, 5, 7, data=b", "),
    ]
    store.commit(pieces[:1], 1.0)
    store.commit(pieces, 2.0)
    assert log_path(tmp_path / "logs", KEY, Stream.STDOUT).read_bytes() == b"hello, "
    assert reader.offsets(KEY) == {Stream.STDOUT: 7}


def test_a_log_that_cannot_be_written_leaves_the_database_unchanged(store, tmp_path, reader):
    (tmp_path / "logs").write_text("a file in the way")
    with pytest.raises(StoreBusy, match="free some space"):
        store.commit([StreamWrite(KEY, Stream.STDOUT, 0, 5, data=b"hello")], 1.0)
    assert reader.offsets(KEY) == {}


def test_a_database_locked_by_another_process_is_a_retryable_error(store, database):
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store._connection.execute("PRAGMA busy_timeout = 1")
    with pytest.raises(StoreBusy):
        store.commit([trial_row(a_trial())], 1.0)
    other.execute("ROLLBACK")
    other.close()
    store.commit([trial_row(a_trial())], 1.0)


def test_the_error_for_a_read_only_database_suggests_write_permission(store):
    store._connection.execute("PRAGMA query_only = 1")
    with pytest.raises(
        StoreBusy, match=r"^cannot write .*readonly.*give this user write permission"
    ) as raised:
        store.commit([trial_row(a_trial())], 1.0)
    assert "space" not in str(raised.value)


def test_the_error_for_a_locked_database_suggests_a_retry(store, database):
    store.close()
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        # In the journal mode DELETE, a writer with an exclusive lock blocks readers. In the mode WAL, which the store uses, it
        # does not.
        other.execute("PRAGMA journal_mode = DELETE")
        with StoreReader(database) as reader:
            reader._connection.execute("PRAGMA busy_timeout = 1")
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(StoreBusy, match=r"^cannot read .*locked; wait and try again$"):
                reader.trials()


@pytest.mark.any_machine
def test_the_error_for_a_reader_in_a_read_only_folder_suggests_write_permission(tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment.sqlite"
        Store.create(path, tmp_path, "EXPERIMT", "{}", b"secret", 1.0).close()
        path.chmod(0o644)
        Path(folder).chmod(0o755)
        with (
            as_another_user(),
            pytest.raises(StoreUnusable, match=r"^cannot read .*write permission in the folder"),
        ):
            StoreReader(path)


def test_the_error_for_a_database_of_an_unknown_format_contains_the_version_of_the_format(
    store, database, tmp_path
):
    store._connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreUnusable, match="version is 99"):
        Store(database, tmp_path)


def test_a_writer_without_the_lease_stores_nothing_and_reports_the_new_holder(
    store, database, reader, tmp_path
):
    def log_of(trial):
        key = AttemptKey(trial, attempt_id(0), "main-0")
        return StreamWrite(key, Stream.STDOUT, 0, 5, b"hello")

    store.commit([trial_row(a_trial())], 1.0)
    with contextlib.closing(RegisteringStore(database, tmp_path / "logs")) as successor:
        with pytest.raises(
            LeaseLost, match=rf"experiment.sqlite: .* process {os.getpid()} on .* holds it now"
        ):
            store.commit([trial_row(a_trial(trial_id="later", sequence_id=1)), log_of("later")], 2.0)
        assert [trial.trial_id for trial in reader.trials()] == [KEY.trial_id]
        assert not (tmp_path / "logs" / "later").exists()
        successor.commit([trial_row(a_trial(trial_id="other", sequence_id=1)), log_of("other")], 3.0)
        assert [trial.trial_id for trial in reader.trials()] == [KEY.trial_id, "other"]
        assert (tmp_path / "logs" / "other").exists()
        with pytest.raises(LeaseLost):
            store.commit([], 4.0)


EARLIER_FORMATS = sorted(Path(__file__).with_name("stores").glob("format-*.sql"))


@pytest.fixture(params=EARLIER_FORMATS, ids=lambda path: path.stem)
def earlier(request, tmp_path):
    path = tmp_path / "earlier.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(request.param.read_text())
    return path


def shape(path):
    """The columns of each table according to SQLite, as an unordered set."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        ]
        return {
            table: {column[1:] for column in connection.execute(f"PRAGMA table_info({table})")}
            for table in tables
        }


def test_a_sample_database_of_each_earlier_format_exists():
    assert [path.stem for path in EARLIER_FORMATS] == [f"format-{n}" for n in range(1, SCHEMA_VERSION)]


def test_a_database_of_an_earlier_format_is_migrated_to_the_current_format(
    store, database, earlier, tmp_path
):
    Store(earlier, tmp_path).close()
    assert shape(earlier) == shape(database)
    Store(earlier, tmp_path).close()


def test_a_reader_reads_an_earlier_format_completely_and_leaves_the_file_unchanged(earlier):
    as_it_was = (earlier.read_bytes(), sorted(earlier.parent.iterdir()))
    # `nnictl` may be newer than the database, and read it before a manager has migrated it.
    with StoreReader(earlier) as reader:
        done, running, waiting = reader.trials()
        live, ended = reader.jobs()
        metrics = [(m.trial_id, m.attempt, m.value) for m in reader.metrics()]
    assert [t.state for t in (done, running, waiting)] == [
        TrialState.SUCCEEDED,
        TrialState.RUNNING,
        TrialState.WAITING,
    ]
    assert (done.run.final, done.run.value, done.run.reason) == ("0.9", 0.9, ExitReason.SUCCEEDED)
    assert [t.run.reporter for t in (done, running, waiting)] == ["main-0", "main-0", None]
    assert ([(job.job_id, job.ever_connected) for job in live], ended) == (
        [("bbbbb", True), ("ccccc", False)],
        ["aaaaa"],
    )
    assert metrics == [("aaaaa", 0, "0.5"), ("aaaaa", 0, "0.9"), ("bbbbb", 1, "0.2")]
    assert (earlier.read_bytes(), sorted(earlier.parent.iterdir())) == as_it_was


def test_a_reader_of_an_earlier_format_detects_changes_and_does_not_migrate_the_database(earlier):
    with contextlib.closing(sqlite3.connect(earlier, isolation_level=None)) as owner:
        owner.execute("PRAGMA journal_mode = WAL")
        with StoreReader(earlier) as reader:
            seen = reader.data_version()
            owner.execute("UPDATE experiment SET error = 'news'")
            assert reader.data_version() != seen
        with StoreReader(earlier) as reader:
            assert reader.experiment().error == "news"
        (version,) = owner.execute("PRAGMA user_version").fetchone()
        assert f"format-{version}" in [path.stem for path in EARLIER_FORMATS]


def test_a_missing_or_damaged_database_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(StoreUnusable, match="nnictl experiment list"):
        Store(tmp_path / "nothing", tmp_path)
    with pytest.raises(StoreUnusable, match="nnictl experiment list"):
        StoreReader(tmp_path / "nothing")
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreUnusable, match="file is not a database; restore it"):
        Store(broken, tmp_path)


def test_data_of_an_unregistered_attempt_is_not_stored(tmp_path):
    with contextlib.closing(Store.create(tmp_path / "db", tmp_path, "EXPERIMT", "{}", b"", 0.0)) as store:
        with pytest.raises(
            InternalError,
            match=r"cannot store data of attempt aBcDe/0+/main-0: the attempt is not registered",
        ):
            store.commit([a_commit(1)], 1.0)
        store.commit([attempt_row(KEY, 3), a_commit(1)], 1.0)


def test_an_attempt_keeps_its_number_after_it_is_marked_as_lost(store, reader):
    store.commit([attempt_row(KEY, 0), trial_row(a_trial(state=TrialState.RUNNING))], 1.0)
    store.commit([attempt_row(KEY, 0, is_lost=True)], 2.0)
    (stored,) = reader.attempts(KEY.trial_id)
    assert (stored.key, stored.number, stored.is_lost) == (KEY, 0, True)
    assert reader.open_attempts()[KEY.trial_id].registered == [stored]
    store.commit([trial_row(a_trial({"reason": ExitReason.JOB_LOST}, state=TrialState.FAILED))], 3.0)
    assert reader.open_attempts() == {}


@pytest.mark.parametrize(
    "earlier", [path for path in EARLIER_FORMATS if path.stem < "format-6"], indirect=True
)
def test_attempts_in_a_store_format_without_attempt_ids_have_their_number_as_id(earlier):
    with StoreReader(earlier) as reader:
        known = {(each.key.trial_id, each.key.attempt_id, each.number) for each in reader.attempts()}
        offsets = reader.offsets(AttemptKey("aaaaa", "0", "main-0"))
    assert {("aaaaa", "0", 0), ("bbbbb", "1", 1)} <= known
    assert offsets[Stream.METRICS] > 0


def test_every_query_is_valid_sql_for_the_current_schema(store):
    for statement in QUERIES.values():
        names = dict.fromkeys(sorted(set(__import__("re").findall(r":(\w+)", statement))))
        values = names or (None,) * statement.count("?")
        assert store._connection.execute("EXPLAIN " + statement, values).fetchall()


def test_the_database_is_not_accessible_to_other_users(store, database):
    assert database.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("count", [0, 1, ROWS_OF_A_PAGE - 1, ROWS_OF_A_PAGE, 2 * ROWS_OF_A_PAGE + 1])
def test_pages_of_metrics_contain_every_record_once_and_in_order(store, reader, count):
    other = AttemptKey("fGhIj", attempt_id(0), "main-0")
    trials = [a_trial(), a_trial(trial_id=other.trial_id, sequence_id=1)]
    commits = [a_commit(*range(n), key=key) for key, n in ((KEY, count), (other, 7)) if n]
    store.commit([*map(trial_row, trials), *commits], 1.0)
    pages = list(reader.metric_pages(None, 0, 99))
    assert all(1 <= len(page) <= ROWS_OF_A_PAGE for page in pages)
    assert [(row.trial_id, row.value) for page in pages for row in page] == [
        (key.trial_id, str(value)) for key, n in ((KEY, count), (other, 7)) for value in range(n)
    ]
    assert len(metrics_of(reader, KEY.trial_id)) == count
    assert metrics_of(reader, "nobody") == []


def test_a_slow_reader_of_metric_pages_does_not_block_a_checkpoint_of_the_write_ahead_log(
    store, reader, database
):
    store.commit([trial_row(a_trial()), a_commit(*range(3 * ROWS_OF_A_PAGE))], 1.0)
    pages = reader.metric_pages(None, 0, 99)
    next(pages)
    (is_busy, _, _) = store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert not is_busy


@pytest.mark.slow
def test_the_write_ahead_log_stays_small_under_constant_reads(store, database, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_LOG_BYTES", 1 << 20)
    monkeypatch.setattr(writer_module, "_WAL_CHECKPOINT_INTERVAL_S", 0.0)
    store.commit([trial_row(a_trial())], 1.0)
    is_terminal, turn = threading.Event(), threading.Barrier(3)

    def read():
        connection = sqlite3.connect(database, isolation_level=None)
        turn.wait()
        while not is_terminal.wait(0.0):
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM stream").fetchone()
            is_terminal.wait(0.01)
            connection.execute("COMMIT")
        connection.close()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    turn.wait()
    offset, largest = 0, 0
    for _ in range(110):
        commit = a_commit(*["x" * 1000] * 100, offset=offset)
        store.commit([commit], 1.0)
        offset = commit.new_offset
        largest = max(largest, Path(f"{database}-wal").stat().st_size)
    is_terminal.set()
    for reader in readers:
        reader.join()
    assert offset > 10 << 20
    assert largest < 6 << 20


def test_an_endless_read_transaction_is_reported_when_the_write_ahead_log_grows(store, database, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_LOG_BYTES", 1 << 16)
    monkeypatch.setattr(writer_module, "_WAL_ALARM_BYTES", 1 << 20)
    monkeypatch.setattr(writer_module, "_WAL_CHECKPOINT_INTERVAL_S", 0.0)
    monkeypatch.setattr(writer_module, "_WAL_CHECKPOINT_WAIT_MS", 1)
    store.commit([trial_row(a_trial())], 1.0)
    endless = sqlite3.connect(database, isolation_level=None)
    endless.execute("BEGIN")
    endless.execute("SELECT count(*) FROM stream").fetchone()
    offset, problem = 0, ""
    while not problem and offset < 100 << 20:
        commit = a_commit(*["x" * 10_000] * 20, offset=offset)
        problem, offset = store.commit([commit], 1.0).problem, commit.new_offset
    assert f"cannot truncate {database}-wal (1 MB)" in problem
    assert f"`fuser {database}` names" in problem
    endless.execute("COMMIT")
    endless.close()
    assert (
        store.commit(
            [experiment_row(ExperimentState.RUNNING, "", 0.0, None, any_compatible_keeper=True)], 1.0
        ).problem
        == ""
    )


def test_an_endless_reader_delays_few_commits_and_does_not_change_the_wait_for_other_writers(
    store, database, monkeypatch
):
    monkeypatch.setattr(writer_module, "MAX_LOG_BYTES", 1 << 16)
    monkeypatch.setattr(writer_module, "_WAL_CHECKPOINT_INTERVAL_S", 3600.0)
    monkeypatch.setattr(writer_module, "_WAL_CHECKPOINT_WAIT_MS", 1)
    # Other writers may be waited for up to 600 s here. If a checkpoint waited as long for the endless reader, the test would time
    # out.
    monkeypatch.setattr(writer_module, "BUSY_WAIT_MS", 600_000)
    store._connection.execute("PRAGMA busy_timeout = 600000")
    store.commit([trial_row(a_trial())], 1.0)
    statements = []
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as endless:
        endless.execute("BEGIN")
        endless.execute("SELECT count(*) FROM stream").fetchone()
        store._connection.set_trace_callback(statements.append)
        offset = 0
        for _ in range(5):
            commit = a_commit(*["x" * 10_000] * 20, offset=offset)
            store.commit([commit], 1.0)
            offset = commit.new_offset
        store._connection.set_trace_callback(None)
    assert sum("wal_checkpoint" in statement for statement in statements) == 1
    assert store._connection.execute("PRAGMA busy_timeout").fetchone() == (600_000,)


def test_the_note_about_the_truncation_of_a_log_is_written_once(store, tmp_path, reader):
    piece = StreamWrite(KEY, Stream.STDOUT, 0, 5, data=b"hello", postscript=b" cut")
    for _ in range(2):
        store.commit([piece], 1.0)
    assert log_path(tmp_path / "logs", KEY, Stream.STDOUT).read_bytes() == b"hello cut"
    assert reader.offsets(KEY) == {Stream.STDOUT: 5}


# ---- log bytes are durable before their offset is stored


def log_write(data, offset=0):
    return StreamWrite(KEY, Stream.STDOUT, offset, offset + len(data), data=data)


def test_log_bytes_are_synced_to_disk_before_their_offset_is_stored(store, reader, tmp_path, monkeypatch):
    path, synced, sync = log_path(tmp_path / "logs", KEY, Stream.STDOUT), [], os.fdatasync

    def noted(descriptor):
        sync(descriptor)
        is_the_log = os.path.samestat(os.fstat(descriptor), path.stat())
        synced.append((is_the_log, path.read_bytes(), reader.offsets(KEY).get(Stream.STDOUT, 0)))

    monkeypatch.setattr(os, "fdatasync", noted)
    store.commit([trial_row(a_trial()), log_write(b"one ")], 1.0)
    store.commit([log_write(b"two ", 4), log_write(b"three", 8)], 2.0)
    assert synced == [(True, b"one ", 0), (True, b"one two three", 4)]
    assert reader.offsets(KEY) == {Stream.STDOUT: 13}


def test_no_data_is_stored_if_syncing_a_log_to_disk_fails(store, reader, monkeypatch):
    store.commit([trial_row(a_trial())], 1.0)

    def fails(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fails)
        with pytest.raises(StoreBusy, match="stdout: Input/output error"):
            store.commit([log_write(b"a line\n"), a_commit(0.5)], 2.0)
    assert (reader.offsets(KEY), metrics_of(reader, KEY.trial_id)) == ({}, [])
    store.commit([log_write(b"a line\n"), a_commit(0.5)], 3.0)
    assert reader.offsets(KEY)[Stream.STDOUT] == 7


def test_a_log_is_stored_completely_if_each_system_call_writes_only_a_part_of_it(
    store, tmp_path, monkeypatch
):
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda descriptor, data, offset: write(descriptor, bytes(data)[:3], offset)
    )
    store.commit([trial_row(a_trial()), log_write(b"a long line\n"), log_write(b"another line\n", 12)], 1.0)
    path = log_path(tmp_path / "logs", KEY, Stream.STDOUT)
    assert path.read_bytes() == b"a long line\nanother line\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_error_for_a_full_disk_contains_the_size_of_the_database_with_its_log(
    store, database, monkeypatch, number
):
    def fails(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdatasync", fails)
    # This commit is so large that SQLite copies its pages into the database at once and keeps the write-ahead log. So the two
    # files together have more than 12 MB.
    store.commit([trial_row(a_trial()), a_commit(*["x" * 999_000] * 6)], 1.0)
    stored_bytes = sum(Path(f"{database}{suffix}").stat().st_size for suffix in ("", "-wal"))
    with pytest.raises(StoreBusy, match=f"the file has {stored_bytes / 1e6:.0f} MB") as raised:
        store.commit([log_write(b"a line\n")], 2.0)
    assert f"stdout: {os.strerror(number)}" in str(raised.value)
    assert stored_bytes > 12e6
    assert wal_bytes(database.with_name("absent")) == 0


def test_the_reported_sync_time_of_a_commit_includes_the_sync_of_its_logs(store, monkeypatch):
    sync, now_s, passed_s = os.fdatasync, time.monotonic, [0.0]

    def takes_a_minute(descriptor):
        passed_s[0] += 60
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", takes_a_minute)
    monkeypatch.setattr(time, "monotonic", lambda: now_s() + passed_s[0])
    assert store.commit([trial_row(a_trial())], 1.0).sync_s < 60
    assert 60 <= store.commit([log_write(b"a line\n")], 2.0).sync_s < 120


def test_a_store_caches_the_row_numbers_of_a_limited_count_of_attempts(store, reader, monkeypatch):
    monkeypatch.setattr(writer_module, "_MAX_CACHED_NUMBERS", 2)
    keys = [AttemptKey(f"t{number}", attempt_id(0), "main-0") for number in range(5)]
    store.commit(
        [trial_row(a_trial(trial_id=key.trial_id, sequence_id=number)) for number, key in enumerate(keys)],
        1.0,
    )
    for key in (*keys, *keys):
        offset = reader.offsets(key).get(Stream.STDOUT, 0)
        store.commit([StreamWrite(key, Stream.STDOUT, offset, offset + 2, b"x\n")], 2.0)
        assert len(store._numbers) <= 2
    assert [reader.offsets(key) for key in keys] == [{Stream.STDOUT: 4}] * 5
