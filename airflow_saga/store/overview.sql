-- What only people look at: list, doctor, prune. Reads over many sagas at once; nothing here is on a step's way.

-- name: needs_person
-- Open sagas that nothing will move by itself, and why; the reasons are worded where they are shown.
SELECT g.saga_id, g.dag_id, g.run_id, g.state, g.cause, g.actor, g.reason, g.changed_at,
       r.state AS request_state, r.number AS request_number, r.asked_at, r.triggered_at,
       coalesce(a.standing, 0) AS standing, coalesce(a.doubtful, 0) AS doubtful
FROM airflow_saga.saga g
LEFT JOIN LATERAL (
    SELECT * FROM airflow_saga.undo_request r
    WHERE r.saga_id = g.saga_id AND r.state IN ('HINTED', 'HELD', 'REQUESTED', 'FROZEN')
) r ON true
LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE a.reconcile_at IS NULL AND (
               g.state <> 'PARTIALLY_CANCELLED' OR s.state = 'PARTLY_UNDONE' AND NOT a.kept)) AS standing,
           count(*) FILTER (WHERE a.state = 'IN_DOUBT' AND s.state = 'STOPPED') AS doubtful,
           count(*) FILTER (WHERE s.state = 'PARTLY_UNDONE' AND NOT a.kept AND a.reconcile_at IS NULL) AS left_over
    FROM airflow_saga.action a JOIN airflow_saga.step s USING (step_id)
    WHERE s.saga_id = g.saga_id AND a.residual AND g.state IN ('PARTIALLY_CANCELLED', 'FAILED', 'SUSPENDED')
) a ON true
WHERE g.state NOT IN ('COMPLETED', 'CANCELLED')
  AND (%(dag_ids)s::text[] IS NULL OR g.dag_id = ANY(%(dag_ids)s::text[]))
  AND (r.state = 'HELD'
       OR g.state = 'PARTIALLY_CANCELLED' AND r.state IS NULL AND a.standing > 0
       OR g.state = 'FAILED' AND r.state IS NULL AND a.standing > 0
          AND (a.doubtful > 0 OR g.cause IN ('incomplete', 'refused'))
       OR g.state = 'SUSPENDED' AND r.state IS NULL AND (a.doubtful > 0 OR a.left_over > 0)
       OR r.state IN ('HINTED', 'REQUESTED', 'FROZEN')
          AND (r.owner_lease_until IS NULL OR r.owner_lease_until < clock_timestamp())
          AND r.asked_at < clock_timestamp() - make_interval(secs => %(start_alert_seconds)s))
ORDER BY g.changed_at LIMIT %(limit)s;

-- name: untold
-- What only who looks at all sagas sees of their undos, and nobody has been told; longest ago first. An undo that waits
-- for a call, for a live step or behind another undo is carried out, as far as it can be.
SELECT g.saga_id, g.dag_id, g.run_id, k.*
FROM airflow_saga.saga g
LEFT JOIN LATERAL (
    SELECT * FROM airflow_saga.undo_request r WHERE r.saga_id = g.saga_id ORDER BY r.number DESC LIMIT 1
) newest ON true
CROSS JOIN LATERAL (
    SELECT 'deadline' AS kind, newest.request_id, newest.number, newest.actor, newest.ended_at AS since
    WHERE g.state = 'PARTIALLY_CANCELLED' AND newest.state = 'EXPIRED'
    UNION ALL
    SELECT CASE r.state WHEN 'HELD' THEN 'held' ELSE 'unstarted' END, r.request_id, r.number, r.actor, r.asked_at
    FROM airflow_saga.undo_request r
    WHERE r.saga_id = g.saga_id AND r.state IN ('HINTED', 'HELD', 'REQUESTED', 'FROZEN')
      AND clock_timestamp() - make_interval(secs => %(start_alert_seconds)s) > greatest(
          r.asked_at, r.owner_lease_until,
          (SELECT max(o.ended_at) FROM airflow_saga.undo_request o WHERE o.saga_id = g.saga_id),
          (SELECT max(greatest(s.changed_at, s.lease_until)) FROM airflow_saga.step s WHERE s.saga_id = g.saga_id),
          (SELECT max(a.lands_by) FROM airflow_saga.step s JOIN airflow_saga.action a USING (step_id)
           WHERE s.saga_id = g.saga_id AND NOT a.settled))
    UNION ALL
    SELECT 'undo deadline', newest.request_id, newest.number, newest.actor, late.since
    FROM (SELECT min(a.undo_deadline_at) AS since
          FROM airflow_saga.step s JOIN airflow_saga.action a USING (step_id)
          WHERE s.saga_id = g.saga_id AND a.residual
            AND a.undo_deadline_at <= CASE a.state WHEN 'COMPENSATING' THEN clock_timestamp()
                                                   WHEN 'COMPENSATION_FAILED' THEN a.undo_finished_at END) late
    WHERE late.since IS NOT NULL AND newest.request_id IS NOT NULL
) k
WHERE g.state NOT IN ('COMPLETED', 'CANCELLED') AND NOT EXISTS (
    SELECT 1 FROM airflow_saga.notice n JOIN airflow_saga.undo_request r USING (request_id)
    WHERE r.saga_id = g.saga_id
      AND (n.request_id = k.request_id AND (n.kind = k.kind OR n.kind = 'stuck' AND k.kind = 'unstarted')
           OR n.kind = 'undo deadline' AND n.kind = k.kind AND n.claimed_at >= k.since))
ORDER BY k.since, k.request_id LIMIT %(limit)s;

-- name: standing_names
SELECT a.action_id AS action, a.name, a.state, s.task_id, s.map_index
FROM airflow_saga.saga g JOIN airflow_saga.step s USING (saga_id) JOIN airflow_saga.action a USING (step_id)
WHERE g.saga_id = %(saga_id)s AND a.residual AND NOT a.kept
  AND (g.state <> 'PARTIALLY_CANCELLED' OR s.state = 'PARTLY_UNDONE') ORDER BY a.action_id;

-- name: standing_of
SELECT s.saga_id, count(*) AS standing FROM airflow_saga.step s JOIN airflow_saga.action a USING (step_id)
WHERE a.residual AND s.saga_id = ANY(%(saga_ids)s::bigint[]) GROUP BY s.saga_id;

-- name: oldest_open_request
SELECT r.*, g.dag_id, g.run_id, clock_timestamp() - r.asked_at AS age
FROM airflow_saga.undo_request r JOIN airflow_saga.saga g USING (saga_id)
WHERE r.state IN ('HINTED', 'HELD', 'REQUESTED', 'FROZEN', 'QUEUED') ORDER BY r.asked_at, r.request_id LIMIT 1;

-- name: newest_step
SELECT host, attached_at FROM airflow_saga.step ORDER BY step_id DESC LIMIT 1;

-- name: dags_with_sagas
SELECT dag_id, count(*) FILTER (WHERE state NOT IN ('COMPLETED', 'CANCELLED')) AS unsettled,
       max(changed_at) AS changed_at
FROM airflow_saga.saga GROUP BY dag_id ORDER BY dag_id;

-- name: prunable
-- The same sagas as prune_actions deletes from.
SELECT count(DISTINCT g.saga_id) AS sagas, count(*) AS actions
FROM airflow_saga.saga g JOIN airflow_saga.step s USING (saga_id) JOIN airflow_saga.action a USING (step_id)
WHERE g.pruned_at IS NOT NULL OR g.state IN ('COMPLETED', 'CANCELLED', 'FAILED')
  AND g.changed_at < clock_timestamp() - make_interval(days => %(retention_days)s)
  AND NOT EXISTS (SELECT 1 FROM airflow_saga.undo_request r
                  WHERE r.saga_id = g.saga_id AND r.state IN ('HINTED', 'HELD', 'REQUESTED', 'QUEUED', 'FROZEN'));

-- name: now
SELECT clock_timestamp() AS now;

-- name: listen
LISTEN airflow_saga_doctor;

-- name: notify
SELECT pg_notify('airflow_saga_doctor', %(word)s);

-- name: open_work
SELECT (SELECT count(*) FROM airflow_saga.saga g JOIN airflow_saga.step s USING (saga_id)
        JOIN airflow_saga.action a USING (step_id)
        WHERE g.state IN ('PARTIALLY_CANCELLED', 'CANCELLING') AND a.residual) AS residuals,
       count(*) AS undo_requests,
       coalesce(extract(epoch FROM clock_timestamp() - min(r.asked_at)), 0)::float8 AS undo_request_age_seconds,
       clock_timestamp() AS moment
FROM airflow_saga.undo_request r
WHERE r.state IN ('HINTED', 'HELD', 'REQUESTED', 'FROZEN', 'QUEUED');
