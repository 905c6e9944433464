-- name: add_experiment -- the one row, when the experiment is created
INSERT INTO experiment (only_row, experiment_id, config, secret, created_at_s, state)
VALUES (1, :experiment_id, :config, :secret, :created_at_s, :state);

-- name: get_experiment -- the one row
SELECT * FROM experiment;

-- name: save_experiment -- what changes while it runs
UPDATE experiment SET state = :state, error = :error, active_s = :active_s, ended_at_s = :ended_at_s,
    keeper_has_matched = :keeper_has_matched;

-- name: save_config -- the experiment as it is from now on
UPDATE experiment SET config = :config;

-- name: add_imported -- one result from elsewhere
INSERT INTO imported (position, parameters, metric) VALUES (?, ?, ?);

-- name: get_imported -- all of them, in the order in which they came
SELECT * FROM imported ORDER BY position;

-- name: save_trial -- the whole row, new or not
INSERT INTO trial (trial_id, sequence_id, parameters, memo, job_id, created_at_s, started_at_s, ended_at_s, state, attempt,
    stop_reason, reason, exit_code, message, final, value, peak_usage, reporter, warning, is_customized, retries, first_attempts)
VALUES (:trial_id, :sequence_id, :parameters, :memo, :job_id, :created_at_s, :started_at_s, :ended_at_s, :state, :attempt,
    :stop_reason, :reason, :exit_code, :message, :final, :value, :peak_usage, :reporter, :warning, :is_customized, :retries,
    :first_attempts)
ON CONFLICT (trial_id) DO UPDATE SET job_id = excluded.job_id, started_at_s = excluded.started_at_s, ended_at_s = excluded.ended_at_s,
    state = excluded.state, attempt = excluded.attempt, stop_reason = excluded.stop_reason, reason = excluded.reason,
    exit_code = excluded.exit_code, message = excluded.message, final = excluded.final, value = excluded.value,
    peak_usage = excluded.peak_usage, reporter = excluded.reporter, warning = excluded.warning,
    retries = excluded.retries, first_attempts = excluded.first_attempts;

-- name: get_trials -- all, in the order they were made
SELECT * FROM trial ORDER BY sequence_id;

-- name: get_trial -- one
SELECT * FROM trial WHERE trial_id = :trial_id;

-- name: get_trial_list -- what a list shows of each, in the order they were made
SELECT trial_id, sequence_id, parameters, state, started_at_s, ended_at_s, reason, exit_code, message, value, warning
FROM trial ORDER BY sequence_id;

-- name: get_trial_ids -- the first of those that begin so; one that is just that comes before them
SELECT trial_id FROM trial WHERE substr(trial_id, 1, length(:beginning)) = :beginning ORDER BY trial_id = :beginning DESC, sequence_id LIMIT :most;

-- name: get_results -- of the trials that succeeded, in the order they were made
SELECT trial_id, parameters, final FROM trial WHERE state = :state AND final IS NOT NULL ORDER BY sequence_id;

-- name: save_job -- a job that may run, or has ended
INSERT INTO job (job_id, created_at_s, ended_at_s, was_heard) VALUES (:job_id, :now_s, :ended_at_s, :was_heard)
ON CONFLICT (job_id) DO UPDATE SET ended_at_s = excluded.ended_at_s, was_heard = excluded.was_heard;

-- name: get_jobs -- all, in the order they were made
SELECT * FROM job ORDER BY rowid;

-- name: get_newest_jobs -- those that have not ended, and of the others so many, newest first
SELECT * FROM job WHERE ended_at_s IS NULL OR rowid IN (
    SELECT rowid FROM job WHERE ended_at_s IS NOT NULL ORDER BY rowid DESC LIMIT :most
) ORDER BY rowid DESC;

-- name: move_offset -- a stream is durable up to here
INSERT INTO stream (trial_id, attempt, task, stream, durable_offset, garbage_bytes)
VALUES (:trial_id, :attempt, :task, :stream, :durable_offset, :garbage_bytes)
ON CONFLICT DO UPDATE SET durable_offset = excluded.durable_offset,
    garbage_bytes = garbage_bytes + excluded.garbage_bytes;

-- name: add_metrics -- records of one attempt, as many as there are rows in VALUES; a second row at a place is a bug and fails
INSERT INTO metric (trial_id, attempt, task, stored_at_s, record_offset, is_final, parameter_id, sequence, value)
SELECT * FROM (SELECT ?, ?, ?, ?) CROSS JOIN (VALUES (?, ?, ?, ?, ?));

-- name: get_offsets -- how far the streams of an attempt are durable
SELECT stream, durable_offset FROM stream WHERE trial_id = :trial_id AND attempt = :attempt AND task = :task;

-- name: get_streams -- whose they are
SELECT DISTINCT trial_id, task, stream FROM stream;

-- name: get_garbage -- the trials whose metrics hold bytes that were no record, and how many
SELECT trial_id, sum(garbage_bytes) AS garbage_bytes FROM stream WHERE garbage_bytes > 0 GROUP BY trial_id;

-- name: get_metrics -- a page of the records that count, in the order of the trials; it begins after a place in the first one
SELECT metric.*, sequence_id FROM trial CROSS JOIN metric USING (trial_id)
WHERE metric.attempt = trial.attempt AND metric.task = trial.reporter AND (:is_final IS NULL OR is_final = :is_final)
    AND sequence_id BETWEEN :first_sequence_id AND :last_sequence_id
    AND record_offset > CASE sequence_id WHEN :first_sequence_id THEN :after_offset ELSE -1 END
ORDER BY sequence_id, record_offset LIMIT :most;

-- name: get_sequence_id -- where a trial stands among the others
SELECT sequence_id FROM trial WHERE trial_id = :trial_id;

-- name: get_latest_intermediates -- the newest intermediate record of each trial that counts
SELECT metric.*, max(record_offset) FROM metric JOIN trial USING (trial_id)
WHERE metric.attempt = trial.attempt AND metric.task = trial.reporter AND NOT is_final
GROUP BY trial_id;

-- name: get_progress_of_trials -- how many intermediate results of each trial count, and the newest of them
SELECT trial_id, count(*) AS count, metric.value AS value, max(record_offset) FROM metric JOIN trial USING (trial_id)
WHERE metric.attempt = trial.attempt AND metric.task = trial.reporter AND NOT is_final
GROUP BY trial_id;

-- name: get_progress_of_trial -- how many intermediate results of one trial count, and the newest of them
SELECT trial_id, count(*) AS count, metric.value AS value, max(record_offset) FROM metric JOIN trial USING (trial_id)
WHERE trial_id = :trial_id AND metric.attempt = trial.attempt AND metric.task = trial.reporter AND NOT is_final
GROUP BY trial_id;

-- name: add_usage -- one sample; told again by a keeper that lost its link, it is the same, and never before the one before it
INSERT INTO usage (trial_id, attempt, task, at_s, cpu_percent, rss_bytes, disk_bytes, gpus)
SELECT :trial_id, :attempt, :task, CASE WHEN latest > :at_s THEN latest + 0.001 ELSE :at_s END,
    :cpu_percent, :rss_bytes, :disk_bytes, :gpus
FROM (SELECT max(at_s) AS latest FROM usage WHERE trial_id = :trial_id AND attempt = :attempt AND task = :task)
WHERE true ON CONFLICT DO NOTHING;

-- name: get_usage_of_trial -- all samples of a trial, of every attempt and task, oldest first
SELECT * FROM usage WHERE trial_id = :trial_id ORDER BY at_s, task;
