-- name: add_experiment -- the one row, when the experiment is created
INSERT INTO experiment (only_row, experiment_id, config, secret, created_at_s, state)
VALUES (1, :experiment_id, :config, :secret, :created_at_s, :state);

-- name: get_experiment -- the one row
SELECT * FROM experiment;

-- name: save_experiment -- the mutable columns
UPDATE experiment SET state = :state, error = :error, active_s = :active_s, ended_at_s = :ended_at_s,
    any_compatible_keeper = :any_compatible_keeper;

-- name: begin_epoch -- only this writer can commit from now on
UPDATE lease SET epoch = epoch + 1, holder = :holder;

-- name: get_lease -- the writer that may commit; read in every transaction
SELECT epoch, holder FROM lease WHERE only_row = 1;

-- name: save_config -- the new configuration
UPDATE experiment SET config = :config;

-- name: add_imported -- imported results: a JSON list of pairs of texts
INSERT INTO imported (position, parameters, metric)
SELECT :position + key, json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(:results);

-- name: get_imported -- all, in order of import
SELECT * FROM imported ORDER BY position;

-- name: save_trial -- the whole row, new or not
INSERT INTO trial (trial_id, sequence_id, parameters, metadata, job_id, created_at_s, started_at_s, ended_at_s, state, attempt,
    stop_reason, reason, exit_code, message, final, value, peak_usage, reporter, warning, is_customized, retries,
    preemptions, stop_asked_at_s, continues)
VALUES (:trial_id, :sequence_id, :parameters, :metadata, :job_id, :created_at_s, :started_at_s, :ended_at_s, :state, :attempt,
    :stop_reason, :reason, :exit_code, :message, :final, :value, :peak_usage, :reporter, :warning, :is_customized, :retries,
    :preemptions, :stop_asked_at_s, :continues)
ON CONFLICT (trial_id) DO UPDATE SET job_id = excluded.job_id, started_at_s = excluded.started_at_s, ended_at_s = excluded.ended_at_s,
    state = excluded.state, attempt = excluded.attempt, stop_reason = excluded.stop_reason, reason = excluded.reason,
    exit_code = excluded.exit_code, message = excluded.message, final = excluded.final, value = excluded.value,
    peak_usage = excluded.peak_usage, reporter = excluded.reporter, warning = excluded.warning,
    retries = excluded.retries, preemptions = excluded.preemptions, stop_asked_at_s = excluded.stop_asked_at_s;

-- name: get_trials -- all, in order of creation
SELECT * FROM trial ORDER BY sequence_id;

-- name: get_trial -- one
SELECT * FROM trial WHERE trial_id = :trial_id;

-- name: get_trial_list -- the columns that a list shows, in order of creation
SELECT trial_id, sequence_id, parameters, state, stop_asked_at_s, started_at_s, ended_at_s, reason, exit_code, message, value, warning
FROM trial ORDER BY sequence_id;

-- name: get_trial_totals -- the number of trials in each state, and the range of their values
SELECT state, count(*) AS count, min(value) AS lowest, max(value) AS highest FROM trial GROUP BY state;

-- name: get_values_over_time -- results with a number of the trials in these states (JSON list), in the order of their ends
SELECT ended_at_s, value, final FROM trial
WHERE state IN (SELECT value FROM json_each(:states)) AND value IS NOT NULL AND ended_at_s IS NOT NULL ORDER BY ended_at_s, sequence_id;

-- name: get_trial_ids -- the first ids with this prefix; an exact match comes first
SELECT trial_id FROM trial WHERE substr(trial_id, 1, length(:beginning)) = :beginning ORDER BY trial_id = :beginning DESC, sequence_id LIMIT :most;

-- name: get_results -- results of the trials in these states (JSON list), in order of creation
SELECT trial_id, parameters, final FROM trial
WHERE state IN (SELECT value FROM json_each(:states)) AND final IS NOT NULL ORDER BY sequence_id;

-- name: save_remarks -- of a trial, or of the experiment (an empty id)
INSERT INTO remarks (trial_id, tags, note) VALUES (:trial_id, :tags, :note)
ON CONFLICT (trial_id) DO UPDATE SET tags = excluded.tags, note = excluded.note;

-- name: get_remarks -- of one trial or of the experiment (an empty id), or of all
SELECT * FROM remarks WHERE :trial_id IS NULL OR trial_id = :trial_id;

-- name: save_job -- a job that may run, or has ended
INSERT INTO job (job_id, created_at_s, ended_at_s, ever_connected) VALUES (:job_id, :now_s, :ended_at_s, :ever_connected)
ON CONFLICT (job_id) DO UPDATE SET ended_at_s = excluded.ended_at_s, ever_connected = excluded.ever_connected;

-- name: get_jobs -- all, in order of creation
SELECT * FROM job ORDER BY rowid;

-- name: get_newest_jobs -- all that have not ended, and the newest of the others; newest first
SELECT * FROM job WHERE ended_at_s IS NULL OR rowid IN (
    SELECT rowid FROM job WHERE ended_at_s IS NOT NULL ORDER BY rowid DESC LIMIT :most
) ORDER BY rowid DESC;

-- name: save_attempt -- an attempt with its number, new or not
INSERT INTO attempt (trial_id, task, attempt, attempt_id, is_lost) VALUES (:trial_id, :task, :attempt, :attempt_id, :is_lost)
ON CONFLICT (trial_id, task, attempt_id) DO UPDATE SET is_lost = excluded.is_lost;

-- name: save_environment -- where and with what a registered attempt runs
UPDATE attempt SET host = :host, node = :node, python = :python, packages = :packages
WHERE trial_id = :trial_id AND task = :task AND attempt_id = :attempt_id;

-- name: get_environments -- of the attempts of one trial, or of all
SELECT trial_id, attempt, task, host, node, python, packages FROM attempt
WHERE :trial_id IS NULL OR trial_id = :trial_id ORDER BY trial_id, attempt, task;

-- name: add_packages -- a list of packages
INSERT INTO packages (digest, list) VALUES (:digest, :list) ON CONFLICT DO NOTHING;

-- name: get_packages -- one list
SELECT list FROM packages WHERE digest = :digest;

-- name: get_package_digests -- those of all lists
SELECT digest FROM packages;

-- name: add_code -- a version of the training code
INSERT INTO code (since_s, digest, git_commit, is_dirty) VALUES (:since_s, :digest, :git_commit, :is_dirty) ON CONFLICT DO NOTHING;

-- name: get_code -- all versions of the training code, in the order of time
SELECT * FROM code ORDER BY since_s;

-- name: get_attempts -- of one trial, or of all, in the order of registration
SELECT * FROM attempt WHERE :trial_id IS NULL OR trial_id = :trial_id ORDER BY trial_id, task, attempt;

-- name: get_open_attempts -- of the trials in none of these states
SELECT attempt.* FROM attempt JOIN trial USING (trial_id)
WHERE trial.state NOT IN (SELECT value FROM json_each(:terminal_states)) ORDER BY trial_id, task, attempt;

-- name: get_number -- the number of an attempt
SELECT attempt FROM attempt WHERE trial_id = :trial_id AND task = :task AND attempt_id = :attempt_id;

-- name: move_offset -- advance the durable offset of a stream
INSERT INTO stream (trial_id, attempt, task, stream, durable_offset, corrupt_bytes)
VALUES (:trial_id, :attempt, :task, :stream, :durable_offset, :corrupt_bytes)
ON CONFLICT DO UPDATE SET durable_offset = excluded.durable_offset,
    corrupt_bytes = corrupt_bytes + excluded.corrupt_bytes;

-- name: add_metrics -- records of one attempt and type, one per row in VALUES; a duplicate offset is a bug and fails
INSERT INTO metric (trial_id, attempt, task, stored_at_s, is_final, parameter_id, record_offset, sequence, value)
SELECT * FROM (SELECT ?, ?, ?, ?, ?, ?) CROSS JOIN (VALUES (?, ?, ?));

-- name: add_mark -- a mark of one attempt; a duplicate offset is a bug and fails
INSERT INTO mark (trial_id, attempt, task, record_offset, checkpoint, source_trial_id, source_attempt_id, source_task, load)
VALUES (:trial_id, :attempt, :task, :record_offset, :checkpoint, :source_trial_id, :source_attempt_id, :source_task, :load);

-- name: remove_old_marks -- all but the newest checkpoints of one attempt, and those from which one of its processes continued
DELETE FROM mark WHERE trial_id = :trial_id AND attempt = :attempt AND task = :task AND source_attempt_id IS NULL
    AND record_offset < (
        SELECT record_offset FROM mark AS newer
        WHERE trial_id = :trial_id AND attempt = :attempt AND task = :task AND source_attempt_id IS NULL
        ORDER BY record_offset DESC LIMIT 1 OFFSET :kept - 1
    )
    AND checkpoint NOT IN (
        SELECT checkpoint FROM mark AS continuation
        WHERE trial_id = :trial_id AND attempt = :attempt AND task = :task AND source_attempt_id IS NOT NULL
    );

-- name: get_marks -- all marks of one trial, those of each task of an attempt in order
SELECT mark.*, attempt_id FROM mark JOIN attempt USING (trial_id, task, attempt)
WHERE trial_id = :trial_id ORDER BY attempt, task, record_offset;

-- name: get_continued -- the trials in a range whose counting attempt has continued from a checkpoint
SELECT DISTINCT trial.trial_id, sequence_id, trial.attempt, reporter FROM mark CROSS JOIN trial USING (trial_id)
WHERE source_attempt_id IS NOT NULL AND mark.attempt = trial.attempt AND mark.task = trial.reporter
    AND sequence_id BETWEEN :first_sequence_id AND :last_sequence_id ORDER BY sequence_id;

-- name: get_offsets -- the durable offsets of an attempt's streams
SELECT stream, durable_offset FROM stream JOIN attempt USING (trial_id, task, attempt)
WHERE trial_id = :trial_id AND task = :task AND attempt_id = :attempt_id;

-- name: get_streams -- trial, task and name of each
SELECT DISTINCT trial_id, task, stream FROM stream;

-- name: get_corrupt_bytes -- the number of corrupt bytes of each trial that has any
SELECT trial_id, sum(corrupt_bytes) AS corrupt_bytes FROM stream WHERE corrupt_bytes > 0 GROUP BY trial_id;

-- name: get_metrics -- a page of the records that count, in the order of the trials, after an offset in the first one
SELECT metric.*, sequence_id FROM trial CROSS JOIN metric USING (trial_id)
WHERE metric.attempt = trial.attempt AND metric.task = trial.reporter AND (:is_final IS NULL OR is_final = :is_final)
    AND sequence_id BETWEEN :first_sequence_id AND :last_sequence_id
    AND record_offset > CASE sequence_id WHEN :first_sequence_id THEN :after_offset ELSE -1 END
ORDER BY sequence_id, record_offset LIMIT :most;

-- name: get_segment -- a page of the records of one task of an attempt between two offsets
SELECT * FROM metric
WHERE trial_id = :trial_id AND attempt = :attempt AND task = :task AND record_offset > :after_offset
    AND record_offset < :end_offset AND (:is_final IS NULL OR is_final = :is_final)
ORDER BY record_offset LIMIT :most;

-- name: get_progress_of_segment -- the number of intermediate results of a segment, and the newest of them
SELECT metric.*, count(*) AS count, max(record_offset) FROM metric
WHERE trial_id = :trial_id AND attempt = :attempt AND task = :task AND record_offset > :after_offset
    AND record_offset < :end_offset AND NOT is_final;

-- name: get_sequence_id -- the sequence number of a trial
SELECT sequence_id FROM trial WHERE trial_id = :trial_id;

-- name: get_latest_intermediates -- the newest intermediate record of each trial that counts
SELECT metric.*, max(record_offset) FROM metric JOIN trial USING (trial_id)
WHERE metric.attempt = trial.attempt AND metric.task = trial.reporter AND NOT is_final
GROUP BY trial_id;

-- name: get_progress_of_trials -- for each trial: the number of intermediate results that count, and the newest of them
SELECT trial_id, count(*) AS count, metric.value AS value, max(record_offset) FROM metric JOIN trial USING (trial_id)
WHERE metric.attempt = trial.attempt AND metric.task = trial.reporter AND NOT is_final
GROUP BY trial_id;

-- name: get_progress_of_trial -- for one trial: the number of intermediate results that count, and the newest of them
SELECT trial_id, count(*) AS count, metric.value AS value, max(record_offset) FROM metric JOIN trial USING (trial_id)
WHERE trial_id = :trial_id AND metric.attempt = trial.attempt AND metric.task = trial.reporter AND NOT is_final
GROUP BY trial_id;

-- name: add_usage -- one sample; a keeper that reconnects may resend the latest one, which is ignored; times never decrease
INSERT INTO usage (trial_id, attempt, task, at_s, cpu_percent, rss_bytes, disk_bytes, gpus)
SELECT :trial_id, :attempt, :task, CASE WHEN latest > :at_s THEN latest + 0.001 ELSE :at_s END,
    :cpu_percent, :rss_bytes, :disk_bytes, :gpus
FROM (SELECT max(at_s) AS latest FROM usage WHERE trial_id = :trial_id AND attempt = :attempt AND task = :task)
WHERE true ON CONFLICT DO NOTHING;

-- name: get_usage_of_trial -- all samples of a trial, of every attempt and task, oldest first
SELECT usage.*, attempt_id FROM usage JOIN attempt USING (trial_id, task, attempt) WHERE trial_id = :trial_id ORDER BY at_s, task;
