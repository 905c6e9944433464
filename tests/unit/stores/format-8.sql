-- A database as 0.7 left it before checkpoints and the record of what ran: the same trials as in format 1.
CREATE TABLE experiment (
    only_row           INTEGER PRIMARY KEY CHECK (only_row = 1),
    experiment_id      TEXT NOT NULL,
    config             TEXT NOT NULL,
    secret             BLOB NOT NULL,
    created_at_s       REAL NOT NULL,
    ended_at_s         REAL,
    state              TEXT NOT NULL,
    error              TEXT NOT NULL DEFAULT '',
    active_s           REAL NOT NULL DEFAULT 0,
    any_compatible_keeper INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE lease (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    epoch    INTEGER NOT NULL,
    holder   TEXT NOT NULL
) STRICT;
INSERT INTO lease (only_row, epoch, holder) VALUES (1, 3, 'process 7 of there');

CREATE TABLE trial (
    trial_id      TEXT PRIMARY KEY,
    sequence_id   INTEGER NOT NULL UNIQUE,
    parameters    TEXT NOT NULL,
    metadata          TEXT NOT NULL,
    job_id        TEXT NOT NULL,
    created_at_s  REAL NOT NULL,
    started_at_s  REAL,
    ended_at_s    REAL,
    state         TEXT NOT NULL,
    attempt       INTEGER,
    stop_reason   TEXT,
    reason        TEXT,
    exit_code     INTEGER,
    message       TEXT NOT NULL DEFAULT '',
    final         TEXT,
    value         REAL,
    peak_usage    TEXT,
    reporter      TEXT,
    warning       TEXT NOT NULL DEFAULT '',
    is_customized INTEGER NOT NULL DEFAULT 0,
    retries       INTEGER NOT NULL DEFAULT 0,
    stop_asked_at_s REAL
) STRICT;

CREATE TABLE attempt (
    trial_id      TEXT NOT NULL,
    task          TEXT NOT NULL,
    attempt       INTEGER NOT NULL,
    attempt_id    TEXT NOT NULL,
    is_lost       INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (trial_id, task, attempt),
    UNIQUE (trial_id, task, attempt_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE job (
    job_id        TEXT PRIMARY KEY,
    created_at_s  REAL NOT NULL,
    ended_at_s    REAL,
    ever_connected     INTEGER NOT NULL
) STRICT;

CREATE TABLE stream (
    trial_id       TEXT NOT NULL,
    attempt        INTEGER NOT NULL,
    task           TEXT NOT NULL,
    stream         TEXT NOT NULL,
    durable_offset INTEGER NOT NULL,
    corrupt_bytes  INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (trial_id, attempt, task, stream)
) STRICT, WITHOUT ROWID;

CREATE TABLE metric (
    trial_id      TEXT NOT NULL,
    attempt       INTEGER NOT NULL,
    task          TEXT NOT NULL,
    record_offset INTEGER NOT NULL,
    is_final      INTEGER NOT NULL,
    parameter_id  TEXT NOT NULL,
    sequence      INTEGER NOT NULL,
    value         TEXT NOT NULL,
    stored_at_s   REAL NOT NULL,
    PRIMARY KEY (trial_id, attempt, task, record_offset)
) STRICT, WITHOUT ROWID;

CREATE TABLE usage (
    trial_id    TEXT NOT NULL,
    attempt     INTEGER NOT NULL,
    task        TEXT NOT NULL,
    at_s        REAL NOT NULL,
    cpu_percent REAL NOT NULL,
    rss_bytes   INTEGER NOT NULL,
    disk_bytes  INTEGER NOT NULL,
    gpus        TEXT NOT NULL,
    PRIMARY KEY (trial_id, attempt, task, at_s)
) STRICT, WITHOUT ROWID;

CREATE TABLE imported (
    position   INTEGER PRIMARY KEY,
    parameters TEXT NOT NULL,
    metric     TEXT NOT NULL
) STRICT;

CREATE TABLE remarks (
    trial_id TEXT PRIMARY KEY,
    tags     TEXT NOT NULL,
    note     TEXT NOT NULL
) STRICT, WITHOUT ROWID;

PRAGMA user_version = 8;

INSERT INTO experiment (only_row, experiment_id, config, secret, created_at_s, state)
    VALUES (1, 'EXPERIMT', '{}', x'0102', 10.0, 'RUNNING');
INSERT INTO trial (trial_id, sequence_id, parameters, metadata, job_id, created_at_s, started_at_s, ended_at_s, state, attempt,
    reason, exit_code, final, value, peak_usage, reporter) VALUES
    ('aaaaa', 0, '{"x": 1.5}', 'null', 'aaaaa', 11.0, 12.0, 13.0, 'SUCCEEDED', 0, 'succeeded', 0, '0.9', 0.9, NULL, 'main-0'),
    ('bbbbb', 1, '{"x": 2.5}', 'null', 'bbbbb', 11.5, 12.5, NULL, 'RUNNING', 1, NULL, NULL, NULL, NULL, NULL, 'main-0'),
    ('ccccc', 2, '{"x": 3.5}', 'null', 'ccccc', 14.0, NULL, NULL, 'WAITING', NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO attempt (trial_id, task, attempt, attempt_id, is_lost) VALUES
    ('aaaaa', 'main-0', 0, '01KASDQ0000000000000000001', 0), ('bbbbb', 'other-0', 0, '01KASDQ0000000000000000002', 0),
    ('bbbbb', 'main-0', 1, '01KASDQ0000000000000000003', 0);
INSERT INTO stream (trial_id, attempt, task, stream, durable_offset) VALUES
    ('aaaaa', 0, 'main-0', 'metrics', 200), ('bbbbb', 1, 'main-0', 'metrics', 100);
INSERT INTO metric (trial_id, attempt, task, record_offset, is_final, parameter_id, sequence, value, stored_at_s) VALUES
    ('aaaaa', 0, 'main-0', 0, 0, '0', 0, '0.5', 12.1),
    ('aaaaa', 0, 'main-0', 100, 1, '0', 0, '0.9', 12.9),
    ('bbbbb', 0, 'other-0', 0, 0, '1', 0, '0.1', 12.6),
    ('bbbbb', 1, 'main-0', 0, 0, '1', 0, '0.2', 12.7);
INSERT INTO job (job_id, created_at_s, ended_at_s, ever_connected) VALUES
    ('aaaaa', 11.0, 13.0, 1), ('bbbbb', 11.5, NULL, 1), ('ccccc', 14.0, NULL, 0);
