-- Migrations of older databases, one schema version at a time; `PRAGMA user_version` holds the version.

-- to: 2 -- jobs have their own table, and one task owns a trial's metrics
ALTER TABLE trial ADD COLUMN reporter TEXT;
ALTER TABLE trial ADD COLUMN warning TEXT NOT NULL DEFAULT '';
UPDATE trial SET reporter = (SELECT task FROM metric WHERE metric.trial_id = trial.trial_id AND metric.attempt = trial.attempt
    ORDER BY record_offset, task LIMIT 1);
CREATE TABLE job (
    job_id        TEXT PRIMARY KEY,
    created_at_s  REAL NOT NULL,
    ended_at_s    REAL,
    was_heard     INTEGER NOT NULL
) STRICT;
INSERT INTO job (job_id, created_at_s, ended_at_s, was_heard)
    SELECT job_id, created_at_s, ended_at_s, started_at_s IS NOT NULL FROM trial ORDER BY sequence_id;

-- to: 3 -- usage samples of trials
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

-- to: 4 -- customised trials, retries, and imported results
ALTER TABLE trial ADD COLUMN is_customized INTEGER NOT NULL DEFAULT 0;
ALTER TABLE trial ADD COLUMN retries INTEGER NOT NULL DEFAULT 0;
ALTER TABLE trial ADD COLUMN first_attempts TEXT NOT NULL DEFAULT '{}';
CREATE TABLE imported (
    position   INTEGER PRIMARY KEY,
    parameters TEXT NOT NULL,
    metric     TEXT NOT NULL
) STRICT;

-- to: 5 -- the lease: the writer that may commit
CREATE TABLE lease (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    epoch    INTEGER NOT NULL,
    holder   TEXT NOT NULL
) STRICT;
INSERT INTO lease (only_row, epoch, holder) VALUES (1, 0, '');

-- to: 6 -- attempts have ids; earlier ones keep their number as id
CREATE TABLE attempt (
    trial_id      TEXT NOT NULL,
    task          TEXT NOT NULL,
    attempt       INTEGER NOT NULL,
    attempt_id    TEXT NOT NULL,
    is_lost       INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (trial_id, task, attempt),
    UNIQUE (trial_id, task, attempt_id)
) STRICT, WITHOUT ROWID;
INSERT INTO attempt (trial_id, task, attempt, attempt_id)
    SELECT trial_id, task, attempt, CAST(attempt AS TEXT) FROM (
        SELECT trial_id, task, attempt FROM stream
        UNION SELECT trial_id, task, attempt FROM metric
        UNION SELECT trial_id, task, attempt FROM usage
    );
INSERT INTO attempt (trial_id, task, attempt, attempt_id)
    SELECT trial_id, coalesce(reporter, ''), attempt, CAST(attempt AS TEXT) FROM trial WHERE attempt IS NOT NULL
    ON CONFLICT DO NOTHING;
UPDATE attempt SET is_lost = 1 WHERE attempt < (
    SELECT json_each.value FROM trial, json_each(trial.first_attempts)
    WHERE trial.trial_id = attempt.trial_id AND json_each.key = attempt.task
);
ALTER TABLE trial DROP COLUMN first_attempts;

-- to: 7 -- columns in the field's terms
ALTER TABLE trial RENAME COLUMN memo TO metadata;
ALTER TABLE job RENAME COLUMN was_heard TO ever_connected;
ALTER TABLE experiment RENAME COLUMN keeper_has_matched TO any_compatible_keeper;
ALTER TABLE stream RENAME COLUMN garbage_bytes TO corrupt_bytes;

-- to: 8 -- tags and notes, and the time of a stop
ALTER TABLE trial ADD COLUMN stop_asked_at_s REAL;
CREATE TABLE remarks (
    trial_id TEXT PRIMARY KEY,
    tags     TEXT NOT NULL,
    note     TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- to: 9 -- checkpoints: marks in the metrics, and trials that continue others; what ran: code, hosts, Python and packages; preemptions
ALTER TABLE trial ADD COLUMN continues TEXT;
CREATE TABLE mark (
    trial_id          TEXT NOT NULL,
    attempt           INTEGER NOT NULL,
    task              TEXT NOT NULL,
    record_offset     INTEGER NOT NULL,
    checkpoint        TEXT NOT NULL,
    source_trial_id   TEXT,
    source_attempt_id TEXT,
    source_task       TEXT,
    load              TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (trial_id, attempt, task, record_offset)
) STRICT, WITHOUT ROWID;
CREATE INDEX continued ON mark (trial_id) WHERE source_attempt_id IS NOT NULL;
ALTER TABLE trial ADD COLUMN preemptions INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempt ADD COLUMN host TEXT NOT NULL DEFAULT '';
ALTER TABLE attempt ADD COLUMN node TEXT NOT NULL DEFAULT '';
ALTER TABLE attempt ADD COLUMN python TEXT NOT NULL DEFAULT '';
ALTER TABLE attempt ADD COLUMN packages TEXT NOT NULL DEFAULT '';
CREATE TABLE packages (
    digest TEXT PRIMARY KEY,
    list   TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE code (
    since_s    REAL PRIMARY KEY,
    digest     TEXT NOT NULL,
    git_commit TEXT,
    is_dirty   INTEGER
) STRICT, WITHOUT ROWID;
