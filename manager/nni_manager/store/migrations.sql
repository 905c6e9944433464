-- What turns a database of an older format into one of today's, one format at a time; `PRAGMA user_version` names the format.

-- to: 2 -- jobs have a table of their own, and one task owns a trial's metrics
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

-- to: 3 -- what trials used, sample by sample
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

-- to: 4 -- trials that a person proposed or the cluster lost, and results from elsewhere
ALTER TABLE trial ADD COLUMN is_customized INTEGER NOT NULL DEFAULT 0;
ALTER TABLE trial ADD COLUMN retries INTEGER NOT NULL DEFAULT 0;
ALTER TABLE trial ADD COLUMN first_attempts TEXT NOT NULL DEFAULT '{}';
CREATE TABLE imported (
    position   INTEGER PRIMARY KEY,
    parameters TEXT NOT NULL,
    metric     TEXT NOT NULL
) STRICT;
