-- name: add_job -- a submitted job
INSERT INTO job (user, name, debug_id, virtual_cluster, priority, total_gpus, total_tasks, total_task_roles, submitted_at_s, config,
    plan, sub_state, execution_type, retries)
VALUES (:user, :name, :debug_id, :virtual_cluster, :priority, :total_gpus, :total_tasks, :total_task_roles, :submitted_at_s, :config,
    :plan, :sub_state, :execution_type, :retries);

-- name: save_job -- the columns of a job that change; a terminal job loses its plan
UPDATE job SET sub_state = :sub_state, execution_type = :execution_type, attempt_id = :attempt_id, retries = :retries,
    launched_at_s = :launched_at_s, completed_at_s = :completed_at_s, code = :code,
    plan = CASE WHEN :is_terminal THEN NULL ELSE plan END
WHERE job_id = :job_id;

-- name: save_attempt -- the whole row, new or not
REPLACE INTO attempt VALUES (:job_id, :attempt_id, :sub_state, :created_at_s, :launched_at_s, :completed_at_s, :exit, :trigger);

-- name: save_task -- the whole row, new or not
REPLACE INTO task VALUES (:job_id, :job_attempt_id, :role, :index, :attempt_id, :mangled_role, :role_order, :task_uid,
    :container_id, :sub_state, :retries, :created_at_s, :launched_at_s, :completed_at_s, :attempt_created_at_s,
    :attempt_launched_at_s, :attempt_completed_at_s, :allocation, :stop_code, :exit);

-- name: add_event -- an event of a job
INSERT INTO event (job_id, type, reason, message, at_s, attempt_id, role, task_index, container_id)
VALUES (:job_id, :type, :reason, :message, :at_s, :attempt_id, :role, :index, :container_id);

-- name: add_notification -- a notification to deliver
INSERT INTO notification (body) VALUES (:body);

-- name: get_notifications -- the oldest undelivered ones
SELECT * FROM notification ORDER BY notification_id LIMIT 100;

-- name: remove_notification -- one that is delivered, or cannot be
DELETE FROM notification WHERE notification_id = :notification_id;

-- name: get_jobs -- all jobs, the newest first; tags as JSON
SELECT job_id, user, name, debug_id, virtual_cluster, priority, total_gpus, total_tasks, total_task_roles, submitted_at_s, sub_state,
    execution_type, attempt_id, retries, launched_at_s, completed_at_s, code,
    (SELECT json_group_array(tag) FROM (SELECT tag FROM tag WHERE tag.job_id = job.job_id ORDER BY tag)) AS tags
FROM job ORDER BY job_id DESC;

-- name: get_job -- one job, by user and name; tags as JSON
SELECT *, (SELECT json_group_array(tag) FROM (SELECT tag FROM tag WHERE tag.job_id = job.job_id ORDER BY tag)) AS tags
FROM job WHERE user = :user AND name = :name;

-- name: get_unfinished -- the jobs that are not terminal, in the order of submission
SELECT * FROM job WHERE plan IS NOT NULL ORDER BY job_id;

-- name: remove_job -- with all of its rows in other tables
DELETE FROM job WHERE job_id = :job_id;

-- name: add_tag -- no-op if the job has it
INSERT INTO tag (job_id, tag) VALUES (:job_id, :tag) ON CONFLICT DO NOTHING;

-- name: remove_tag -- no-op if the job does not have it
DELETE FROM tag WHERE job_id = :job_id AND tag = :tag;

-- name: get_attempt -- one attempt of a job
SELECT *, trigger_ AS "trigger" FROM attempt WHERE job_id = :job_id AND attempt_id = :attempt_id;

-- name: get_tasks -- the tasks of an attempt, each with its newest attempt, in the order of the job file
SELECT *, MAX(attempt_id), task_index AS "index", place AS allocation FROM task WHERE job_id = :job_id AND job_attempt_id = :job_attempt_id
GROUP BY role, task_index ORDER BY role_order, task_index;

-- name: get_task_attempts -- all attempts of one task, the newest first; the role in either spelling
SELECT *, task_index AS "index", place AS allocation FROM task
WHERE job_id = :job_id AND job_attempt_id = :job_attempt_id AND :role IN (role, mangled_role) AND task_index = :task_index
ORDER BY attempt_id DESC;

-- name: get_events -- of a job, the oldest first
SELECT *, task_index AS "index" FROM event WHERE job_id = :job_id ORDER BY event_id;
