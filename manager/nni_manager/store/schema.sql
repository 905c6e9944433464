-- Everything the manager knows of one experiment. One file per experiment, written by one process.

CREATE TABLE experiment (
    only_row           INTEGER PRIMARY KEY CHECK (only_row = 1),
    experiment_id      TEXT NOT NULL,
    config             TEXT NOT NULL,              -- ExperimentConfig as JSON
    secret             BLOB NOT NULL,              -- keepers' tokens are derived from it
    created_at_s       REAL NOT NULL,              -- all times in seconds since the epoch
    ended_at_s         REAL,
    state              TEXT NOT NULL,              -- ExperimentState
    error              TEXT NOT NULL DEFAULT '',
    active_s           REAL NOT NULL DEFAULT 0,    -- time spent running, over all managers
    keeper_has_matched INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE trial (
    trial_id      TEXT PRIMARY KEY,
    sequence_id   INTEGER NOT NULL UNIQUE,
    parameters    TEXT NOT NULL,                   -- JSON, as the training code gets them
    memo          TEXT NOT NULL,                   -- JSON, the tuner's own note
    job_id        TEXT NOT NULL,                   -- empty as long as no job was given the trial
    created_at_s  REAL NOT NULL,
    started_at_s  REAL,
    ended_at_s    REAL,
    state         TEXT NOT NULL,                   -- TrialState
    attempt       INTEGER,                         -- the one whose records count
    stop_reason   TEXT,                            -- ExitReason, on record before any signal is sent
    reason        TEXT,                            -- ExitReason
    exit_code     INTEGER,
    message       TEXT NOT NULL DEFAULT '',
    final         TEXT,                            -- JSON text of the final result
    value         REAL,                            -- the number in it
    peak_usage    TEXT,                            -- PeakUsage as JSON
    reporter      TEXT,                            -- the task whose metrics count: it reported first
    warning       TEXT NOT NULL DEFAULT '',
    is_customized INTEGER NOT NULL DEFAULT 0,      -- whether a person gave its parameters
    retries       INTEGER NOT NULL DEFAULT 0,      -- how often it was begun again because the cluster lost it
    first_attempts TEXT NOT NULL DEFAULT '{}'      -- JSON: by task, the first attempt that was not lost so
) STRICT;

CREATE TABLE job (
    job_id        TEXT PRIMARY KEY,
    created_at_s  REAL NOT NULL,
    ended_at_s    REAL,                            -- NULL while it may run
    was_heard     INTEGER NOT NULL                 -- whether a keeper of it has ever connected
) STRICT;

-- How far each stream of each attempt is durable. For `metrics` this moves in the transaction that adds the rows.
CREATE TABLE stream (
    trial_id       TEXT NOT NULL,
    attempt        INTEGER NOT NULL,
    task           TEXT NOT NULL,
    stream         TEXT NOT NULL,
    durable_offset INTEGER NOT NULL,
    garbage_bytes  INTEGER NOT NULL DEFAULT 0,     -- bytes that were no record
    PRIMARY KEY (trial_id, attempt, task, stream)
) STRICT, WITHOUT ROWID;

-- A record is known by where it lies in its file: the key makes counting it twice impossible.
CREATE TABLE metric (
    trial_id      TEXT NOT NULL,
    attempt       INTEGER NOT NULL,
    task          TEXT NOT NULL,
    record_offset INTEGER NOT NULL,
    is_final      INTEGER NOT NULL,
    parameter_id  TEXT NOT NULL,                   -- JSON
    sequence      INTEGER NOT NULL,
    value         TEXT NOT NULL,                   -- JSON text, as reported
    stored_at_s   REAL NOT NULL,
    PRIMARY KEY (trial_id, attempt, task, record_offset)
) STRICT, WITHOUT ROWID;

-- What the tasks of trials used, every few seconds.
CREATE TABLE usage (
    trial_id    TEXT NOT NULL,
    attempt     INTEGER NOT NULL,
    task        TEXT NOT NULL,
    at_s        REAL NOT NULL,
    cpu_percent REAL NOT NULL,
    rss_bytes   INTEGER NOT NULL,
    disk_bytes  INTEGER NOT NULL,
    gpus        TEXT NOT NULL,                     -- JSON: a list of GpuUsage
    PRIMARY KEY (trial_id, attempt, task, at_s)
) STRICT, WITHOUT ROWID;

-- Results from elsewhere that the tuner was taught, in the order in which they came.
CREATE TABLE imported (
    position   INTEGER PRIMARY KEY,
    parameters TEXT NOT NULL,                      -- JSON
    metric     TEXT NOT NULL                       -- JSON text of all that was reported as the result
) STRICT;
