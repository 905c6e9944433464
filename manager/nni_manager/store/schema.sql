-- The manager's state of one experiment. One file per experiment, written by one process.

CREATE TABLE experiment (
    only_row           INTEGER PRIMARY KEY CHECK (only_row = 1),
    experiment_id      TEXT NOT NULL,
    config             TEXT NOT NULL,              -- ExperimentConfig as JSON
    secret             BLOB NOT NULL,              -- keepers' tokens are derived from it
    created_at_s       REAL NOT NULL,              -- all times in seconds since the epoch
    ended_at_s         REAL,
    state              TEXT NOT NULL,              -- ExperimentState
    error              TEXT NOT NULL DEFAULT '',
    active_s           REAL NOT NULL DEFAULT 0,    -- running time, over all managers
    any_compatible_keeper INTEGER NOT NULL DEFAULT 0
) STRICT;

-- The writer that may commit: the last one that opened the database for writing.
CREATE TABLE lease (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    epoch    INTEGER NOT NULL,                     -- incremented by each writer
    holder   TEXT NOT NULL                         -- the writer's process, for people
) STRICT;
INSERT INTO lease (only_row, epoch, holder) VALUES (1, 0, '');

CREATE TABLE trial (
    trial_id      TEXT PRIMARY KEY,
    sequence_id   INTEGER NOT NULL UNIQUE,
    parameters    TEXT NOT NULL,                   -- JSON, as training code receives them
    metadata      TEXT NOT NULL,                   -- JSON, the tuner's own metadata
    job_id        TEXT NOT NULL,                   -- empty until the trial is assigned to a job
    created_at_s  REAL NOT NULL,
    started_at_s  REAL,
    ended_at_s    REAL,
    state         TEXT NOT NULL,                   -- TrialState
    attempt       INTEGER,                         -- the attempt whose records count, see table attempt
    stop_reason   TEXT,                            -- ExitReason, stored before any signal is sent
    reason        TEXT,                            -- ExitReason
    exit_code     INTEGER,
    message       TEXT NOT NULL DEFAULT '',
    final         TEXT,                            -- JSON text of the final result
    value         REAL,                            -- the number in it
    peak_usage    TEXT,                            -- PeakUsage as JSON
    reporter      TEXT,                            -- the task whose metrics count: the first to report
    warning       TEXT NOT NULL DEFAULT '',
    is_customized INTEGER NOT NULL DEFAULT 0,      -- 1 if a person set its parameters
    retries       INTEGER NOT NULL DEFAULT 0,      -- number of restarts because the cluster lost it
    preemptions   INTEGER NOT NULL DEFAULT 0,      -- number of restarts because the cluster preempted it
    stop_asked_at_s REAL,                          -- when the stop was requested
    continues     TEXT                             -- the trial whose checkpoint this one loads first
) STRICT;

-- Every attempt with stored data. Its id is its identity; the number represents it in the tables below, and for people.
CREATE TABLE attempt (
    trial_id      TEXT NOT NULL,
    task          TEXT NOT NULL,                   -- empty if version 0.6 did not store it
    attempt       INTEGER NOT NULL,                -- counts from 0 per task, in order of registration
    attempt_id    TEXT NOT NULL,                   -- a ULID; the number for attempts of version 0.6
    is_lost       INTEGER NOT NULL DEFAULT 0,      -- 1 if declared lost: it never counts again
    host          TEXT NOT NULL DEFAULT '',        -- here and below: empty if unknown
    node          TEXT NOT NULL DEFAULT '',        -- the cluster's name of the machine
    python        TEXT NOT NULL DEFAULT '',        -- the version of the training code's interpreter
    packages      TEXT NOT NULL DEFAULT '',        -- the digest of a list in table packages
    PRIMARY KEY (trial_id, task, attempt),
    UNIQUE (trial_id, task, attempt_id)
) STRICT, WITHOUT ROWID;

-- Lists of installed packages; many attempts share one.
CREATE TABLE packages (
    digest TEXT PRIMARY KEY,                       -- SHA-256 of the list, in hex
    list   TEXT NOT NULL                           -- NAME==VERSION, one per line
) STRICT, WITHOUT ROWID;

-- The training code, from the start of a manager that found it changed.
CREATE TABLE code (
    since_s    REAL PRIMARY KEY,
    digest     TEXT NOT NULL,                      -- of the code folder's content; empty if unknown
    git_commit TEXT,                               -- NULL outside a git repository
    is_dirty   INTEGER                             -- 1 if the folder differs from the commit
) STRICT, WITHOUT ROWID;

CREATE TABLE job (
    job_id        TEXT PRIMARY KEY,
    created_at_s  REAL NOT NULL,
    ended_at_s    REAL,                            -- NULL while it may run
    ever_connected INTEGER NOT NULL                -- 1 if a keeper of it has ever connected
) STRICT;

-- The durable offset of each stream of each attempt. For `metrics` it moves in the transaction that adds the rows.
CREATE TABLE stream (
    trial_id       TEXT NOT NULL,
    attempt        INTEGER NOT NULL,
    task           TEXT NOT NULL,
    stream         TEXT NOT NULL,
    durable_offset INTEGER NOT NULL,
    corrupt_bytes  INTEGER NOT NULL DEFAULT 0,     -- bytes that are not part of a record
    PRIMARY KEY (trial_id, attempt, task, stream)
) STRICT, WITHOUT ROWID;

-- The key contains a record's offset in its file, so no record can be counted twice.
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

-- The marks in the metrics of attempts: see nni_manager.domain.learning_curve.
CREATE TABLE mark (
    trial_id          TEXT NOT NULL,
    attempt           INTEGER NOT NULL,
    task              TEXT NOT NULL,
    record_offset     INTEGER NOT NULL,
    checkpoint        TEXT NOT NULL,               -- its name, unique in its attempt
    source_trial_id   TEXT,                        -- NULL: the checkpoint was saved here; else a process continued here
    source_attempt_id TEXT,                        --   from this checkpoint of this attempt
    source_task       TEXT,
    load              TEXT NOT NULL DEFAULT '',    -- the same in all marks of one load
    PRIMARY KEY (trial_id, attempt, task, record_offset)
) STRICT, WITHOUT ROWID;
CREATE INDEX continued ON mark (trial_id) WHERE source_attempt_id IS NOT NULL;

-- Resource usage of trials' tasks, sampled every few seconds.
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

-- The tags and the note that people gave a trial or the experiment. No row: none so far.
CREATE TABLE remarks (
    trial_id TEXT PRIMARY KEY,                     -- empty: the experiment itself
    tags     TEXT NOT NULL,                        -- JSON: a list of texts
    note     TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- Imported results that the tuner received, in order of import.
CREATE TABLE imported (
    position   INTEGER PRIMARY KEY,
    parameters TEXT NOT NULL,                      -- JSON
    metric     TEXT NOT NULL                       -- JSON text of the complete reported result
) STRICT;
