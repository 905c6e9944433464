-- The jobs of a local cluster. Times in seconds since the epoch; JSON where a column says so.

CREATE TABLE job (
    job_id INTEGER PRIMARY KEY,          -- in the order of submission
    user TEXT NOT NULL,
    name TEXT NOT NULL,
    debug_id TEXT NOT NULL,
    virtual_cluster TEXT NOT NULL,
    priority TEXT,
    total_gpus INTEGER NOT NULL,
    total_tasks INTEGER NOT NULL,
    total_task_roles INTEGER NOT NULL,
    submitted_at_s REAL NOT NULL,
    config TEXT NOT NULL,                -- as submitted, with masked secrets
    plan TEXT,                           -- JSON, with the secrets; NULL once the job is terminal
    sub_state TEXT NOT NULL,
    execution_type TEXT NOT NULL,
    attempt_id INTEGER NOT NULL DEFAULT 0,
    retries TEXT NOT NULL,               -- JSON
    launched_at_s REAL,
    completed_at_s REAL,
    code INTEGER,                        -- exit code of the newest attempt, actual or already decided
    UNIQUE (user, name)
);

CREATE TABLE attempt (
    job_id INTEGER NOT NULL REFERENCES job ON DELETE CASCADE,
    attempt_id INTEGER NOT NULL,
    sub_state TEXT NOT NULL,
    created_at_s REAL NOT NULL,
    launched_at_s REAL,
    completed_at_s REAL,
    exit TEXT,                           -- JSON; NULL until decided
    trigger_ TEXT,                       -- JSON; NULL until decided
    PRIMARY KEY (job_id, attempt_id)
) WITHOUT ROWID;

CREATE TABLE task (                      -- one row for each attempt of a task
    job_id INTEGER NOT NULL REFERENCES job ON DELETE CASCADE,
    job_attempt_id INTEGER NOT NULL,
    role TEXT NOT NULL,
    task_index INTEGER NOT NULL,
    attempt_id INTEGER NOT NULL,
    mangled_role TEXT NOT NULL,
    role_order INTEGER NOT NULL,
    task_uid TEXT NOT NULL,
    container_id TEXT NOT NULL,
    sub_state TEXT NOT NULL,
    retries TEXT NOT NULL,               -- JSON
    created_at_s REAL NOT NULL,
    launched_at_s REAL,
    completed_at_s REAL,
    attempt_created_at_s REAL NOT NULL,
    attempt_launched_at_s REAL,
    attempt_completed_at_s REAL,
    place TEXT,                          -- JSON
    stop_code INTEGER,
    exit TEXT,                           -- JSON
    PRIMARY KEY (job_id, job_attempt_id, role, task_index, attempt_id)
) WITHOUT ROWID;

CREATE TABLE tag (
    job_id INTEGER NOT NULL REFERENCES job ON DELETE CASCADE,
    tag TEXT NOT NULL,
    PRIMARY KEY (job_id, tag)
) WITHOUT ROWID;

CREATE TABLE event (
    event_id INTEGER PRIMARY KEY,
    job_id INTEGER NOT NULL REFERENCES job ON DELETE CASCADE,
    type TEXT NOT NULL,
    reason TEXT NOT NULL,
    message TEXT NOT NULL,
    at_s REAL NOT NULL,
    attempt_id INTEGER NOT NULL,
    role TEXT,
    task_index INTEGER,
    container_id TEXT
);
CREATE INDEX event_of_job ON event (job_id);

CREATE TABLE notification (              -- undelivered notifications
    notification_id INTEGER PRIMARY KEY,
    body TEXT NOT NULL                   -- JSON
);
