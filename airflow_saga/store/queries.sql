-- Every statement on the saga store, one name each. Lock order everywhere: saga, step, action.
-- Leases, order and A1 use the database's clock: clock_timestamp(), never a worker's.

-- name: write_forward
-- The hot path, one commit: how one call ended (never refused while the fence is ours), and either the intent of one
-- about to begin (only while saga and step run) or a READ_ONLY call's row, born with its outcome. The lock comes first
-- and holds for both: a cancel that committed while this waited is seen, because a locking read returns the newest row.
-- A try that proved NotApplied speaks for itself only: while an earlier one is in doubt, the action stays in doubt.
-- A seq that is used already begins nothing, and the outcome beside it is taken all the same (P9).
WITH held AS MATERIALIZED (
    SELECT g.state AS saga_state, s.state AS step_state, s.fence
    FROM airflow_saga.saga g, airflow_saga.step s
    WHERE g.saga_id = %(saga_id)s::bigint AND s.step_id = %(step_id)s::bigint
    FOR SHARE
), ended AS (
    UPDATE airflow_saga.action a
    SET state = CASE WHEN %(ended_state)s::text = 'FAILED' AND a.in_doubt THEN 'IN_DOUBT'
                     ELSE %(ended_state)s::text END,
        in_doubt = %(ended_state)s::text = 'IN_DOUBT' OR (%(ended_state)s::text = 'FAILED' AND a.in_doubt),
        result = %(ended_result)s::text, result_lost = %(ended_lost)s::bool, error = %(ended_error)s::text,
        finished_at = clock_timestamp(),
        deferral = CASE WHEN %(ended_state)s::text <> 'DONE' THEN a.deferral END,
        lands_by = CASE WHEN %(ended_own)s::bool THEN NULL ELSE a.lands_by END
    FROM held
    WHERE held.fence = %(fence)s::int AND a.step_id = %(step_id)s::bigint AND a.generation = %(generation)s::int
      AND a.seq = %(ended_seq)s::int AND a.state = 'PENDING'
    RETURNING a.seq
), begun AS (
    INSERT INTO airflow_saga.action (saga_id, step_id, generation, seq, parallel, name, version, effect, fingerprint,
                                     key, state, params, result, result_lost, error, lands_by, finished_at)
    SELECT %(saga_id)s::bigint, %(step_id)s::bigint, %(generation)s::int, %(seq)s::int, %(parallel)s::bool, %(name)s::text, %(version)s::int,
           %(effect)s::text, %(fingerprint)s::text, %(key)s::text, %(state)s::text, %(params)s::text, %(result)s::text, %(lost)s::bool, %(error)s::text,
           clock_timestamp() + make_interval(secs => %(lands_seconds)s::float8),
           CASE WHEN %(lands_seconds)s::float8 IS NULL THEN clock_timestamp() END
    FROM held
    WHERE held.fence = %(fence)s::int AND %(seq)s::int IS NOT NULL
      AND (%(state)s::text <> 'PENDING' OR (held.saga_state = 'RUNNING' AND held.step_state = 'RUNNING'))
    ON CONFLICT ON CONSTRAINT one_action_per_seq DO NOTHING
    RETURNING seq
)
SELECT saga_state, step_state, fence, (SELECT seq FROM ended), (SELECT seq FROM begun) FROM held;

-- name: write_forward_with_readings
-- The same with any number of READ_ONLY calls beside it, as an agent has it: what the model said rides with the intent of
-- the tool that it asked for. Rows are born in the order of their seqs.
WITH held AS MATERIALIZED (
    SELECT g.state AS saga_state, s.state AS step_state, s.fence
    FROM airflow_saga.saga g, airflow_saga.step s
    WHERE g.saga_id = %(saga_id)s::bigint AND s.step_id = %(step_id)s::bigint
    FOR SHARE
), ended AS (
    UPDATE airflow_saga.action a
    SET state = CASE WHEN %(ended_state)s::text = 'FAILED' AND a.in_doubt THEN 'IN_DOUBT'
                     ELSE %(ended_state)s::text END,
        in_doubt = %(ended_state)s::text = 'IN_DOUBT' OR (%(ended_state)s::text = 'FAILED' AND a.in_doubt),
        result = %(ended_result)s::text, result_lost = %(ended_lost)s::bool, error = %(ended_error)s::text,
        finished_at = clock_timestamp(),
        deferral = CASE WHEN %(ended_state)s::text <> 'DONE' THEN a.deferral END,
        lands_by = CASE WHEN %(ended_own)s::bool THEN NULL ELSE a.lands_by END
    FROM held
    WHERE held.fence = %(fence)s::int AND a.step_id = %(step_id)s::bigint AND a.generation = %(generation)s::int
      AND a.seq = %(ended_seq)s::int AND a.state = 'PENDING'
    RETURNING a.seq
), births AS (
    SELECT r.seq, r.parallel, r.name, r.version, r.effect, r.fingerprint, r.key, r.state, r.params, r.result, r.lost,
           r.error, NULL::float8 AS lands_seconds
    FROM json_to_recordset(%(readings)s::json) AS r(seq int, parallel bool, name text, version int, effect text,
         fingerprint text, key text, state text, params text, result text, lost bool, error text)
    UNION ALL
    SELECT %(seq)s::int, %(parallel)s::bool, %(name)s::text, %(version)s::int, %(effect)s::text,
           %(fingerprint)s::text, %(key)s::text, %(state)s::text, %(params)s::text, %(result)s::text, %(lost)s::bool,
           %(error)s::text, %(lands_seconds)s::float8
    FROM held
    WHERE %(seq)s::int IS NOT NULL AND held.saga_state = 'RUNNING' AND held.step_state = 'RUNNING'
), begun AS (
    INSERT INTO airflow_saga.action (saga_id, step_id, generation, seq, parallel, name, version, effect, fingerprint,
                                     key, state, params, result, result_lost, error, lands_by, finished_at)
    SELECT %(saga_id)s::bigint, %(step_id)s::bigint, %(generation)s::int, b.seq, b.parallel, b.name, b.version,
           b.effect, b.fingerprint, b.key, b.state, b.params, b.result, b.lost, b.error,
           clock_timestamp() + make_interval(secs => b.lands_seconds),
           CASE WHEN b.lands_seconds IS NULL THEN clock_timestamp() END
    FROM held, births b
    WHERE held.fence = %(fence)s::int
    ORDER BY b.seq
    ON CONFLICT ON CONSTRAINT one_action_per_seq DO NOTHING
    RETURNING seq
)
SELECT saga_state, step_state, fence, (SELECT seq FROM ended), (SELECT array_agg(seq) FROM begun) FROM held;

-- name: reassert_intent
-- More than a second went by between an intent and its call (A1), or nobody knows whether the intent was committed, or
-- a call comes back from the triggerer: all of begin's guards again, and a new time to land.
WITH held AS MATERIALIZED (
    SELECT g.state AS saga_state, s.state AS step_state, s.fence
    FROM airflow_saga.saga g, airflow_saga.step s
    WHERE g.saga_id = %(saga_id)s::bigint AND s.step_id = %(step_id)s::bigint
    FOR SHARE
), again AS (
    UPDATE airflow_saga.action a
    SET lands_by = clock_timestamp() + make_interval(secs => %(lands_seconds)s), deferred = false
    FROM held
    WHERE held.fence = %(fence)s AND held.saga_state = 'RUNNING' AND held.step_state = 'RUNNING'
      AND a.step_id = %(step_id)s::bigint AND a.generation = %(generation)s AND a.seq = %(seq)s AND a.state = 'PENDING'
    RETURNING a.seq
)
SELECT saga_state, step_state, fence, (SELECT seq FROM again) FROM held;

-- name: retry_action
-- Another try of a call that proved NotApplied, or of an idempotent one in doubt. All of begin's guards, and A1.
WITH held AS MATERIALIZED (
    SELECT g.state AS saga_state, s.state AS step_state, s.fence
    FROM airflow_saga.saga g, airflow_saga.step s
    WHERE g.saga_id = %(saga_id)s::bigint AND s.step_id = %(step_id)s::bigint
    FOR SHARE
), begun AS (
    UPDATE airflow_saga.action a
    SET state = 'PENDING', in_doubt = (a.state = 'IN_DOUBT'), tries = tries + 1, error = NULL, finished_at = NULL,
        lands_by = clock_timestamp() + make_interval(secs => %(lands_seconds)s)
    FROM held
    WHERE held.fence = %(fence)s AND held.saga_state = 'RUNNING' AND held.step_state = 'RUNNING'
      AND a.step_id = %(step_id)s AND a.generation = %(generation)s AND a.seq = %(seq)s
      AND a.name = %(name)s AND a.fingerprint = %(fingerprint)s AND a.tries - a.tries_before < %(max_tries)s
      AND (a.lands_by IS NULL OR a.lands_by <= clock_timestamp())
      AND (a.state = 'FAILED' OR (a.state = 'IN_DOUBT' AND %(idempotent)s
           AND (%(key_lifetime_seconds)s::float8 IS NULL
                OR a.begun_at + make_interval(secs => %(key_lifetime_seconds)s::float8) > clock_timestamp())))
    RETURNING a.tries
)
SELECT saga_state, step_state, fence, (SELECT tries FROM begun) AS tries FROM held;

-- name: heartbeat
-- Renews the lease if it is still ours, keeps the newest checkpoint, and reads what the saga wants of us.
WITH beat AS (
    UPDATE airflow_saga.step
    SET lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s),
        checkpoint = CASE WHEN %(with_checkpoint)s THEN %(checkpoint)s ELSE checkpoint END,
        checkpoint_seq = CASE WHEN %(with_checkpoint)s THEN %(checkpoint_seq)s ELSE checkpoint_seq END
    WHERE step_id = %(step_id)s AND fence = %(fence)s AND state IN ('RUNNING', 'UNDOING')
    RETURNING fence
)
SELECT g.state, g.mode, g.stop_now, g.actor, g.reason, EXISTS (SELECT 1 FROM beat) AS held,
       CASE WHEN g.state = 'CANCELLING' THEN extract(epoch FROM clock_timestamp() - g.changed_at)::float8 END AS cancelled_for
FROM airflow_saga.saga g WHERE g.saga_id = %(saga_id)s;

-- name: lock_saga
SELECT * FROM airflow_saga.saga WHERE dag_id = %(dag_id)s AND run_id = %(run_id)s FOR UPDATE;

-- name: lock_saga_by_id
SELECT * FROM airflow_saga.saga WHERE saga_id = %(saga_id)s FOR UPDATE;

-- name: insert_saga
INSERT INTO airflow_saga.saga (dag_id, run_id, state, cause, actor, reason, stop_clear_number)
VALUES (%(dag_id)s, %(run_id)s, %(state)s, %(cause)s, %(actor)s, %(reason)s, %(stop_clear_number)s)
ON CONFLICT ON CONSTRAINT one_saga_per_run DO NOTHING
RETURNING saga_id;

-- name: move_saga
-- The deadline of a stop is never sooner than what may still land.
UPDATE airflow_saga.saga
SET state = %(state)s, mode = %(mode)s, cause = %(cause)s, actor = %(actor)s, reason = %(reason)s,
    stop_clear_number = greatest(stop_clear_number, %(stop_clear_number)s),
    stop_now = %(stop_now)s,
    deadline_at = CASE WHEN %(state)s <> 'CANCELLING' THEN NULL ELSE greatest(
        clock_timestamp() + make_interval(secs => cancel_deadline_seconds),
        (SELECT max(a.lands_by) + interval '15 seconds' FROM airflow_saga.step s JOIN airflow_saga.action a USING (step_id)
         WHERE s.saga_id = saga.saga_id AND a.residual)) END,
    changed_at = clock_timestamp()
WHERE saga_id = %(saga_id)s;

-- name: stop_saga_again
UPDATE airflow_saga.saga
SET stop_now = stop_now OR %(stop_now)s, stop_clear_number = greatest(stop_clear_number, %(stop_clear_number)s)
WHERE saga_id = %(saga_id)s;

-- name: attach_saga
-- The saga as its newest attach leaves it: running, with the DAG's policies, which a listener cannot see.
UPDATE airflow_saga.saga
SET state = 'RUNNING', mode = NULL, stop_now = false, deadline_at = NULL,
    cause = CASE WHEN state = 'RUNNING' AND clear_number >= %(clear_number)s THEN cause END,
    actor = CASE WHEN state = 'RUNNING' AND clear_number >= %(clear_number)s THEN actor END,
    reason = CASE WHEN state = 'RUNNING' AND clear_number >= %(clear_number)s THEN reason END,
    clear_number = greatest(clear_number, %(clear_number)s), on_failure = %(on_failure)s,
    on_compensation_failure = %(on_compensation_failure)s,
    cancel_deadline_seconds = %(cancel_deadline_seconds)s,
    changed_at = CASE WHEN state = 'RUNNING' THEN changed_at ELSE clock_timestamp() END
WHERE saga_id = %(saga_id)s
RETURNING *;

-- name: note_refusal
-- The attach of another clear forgets it, so the clear that it belongs to is kept with it.
UPDATE airflow_saga.saga
SET cause = 'refused', reason = %(reason)s, clear_number = greatest(clear_number, %(clear_number)s)
WHERE saga_id = %(saga_id)s AND state = 'RUNNING';

-- name: lock_step
SELECT * FROM airflow_saga.step
WHERE saga_id = %(saga_id)s AND task_id = %(task_id)s AND map_index = %(map_index)s FOR UPDATE;

-- name: lock_step_by_id
SELECT * FROM airflow_saga.step WHERE step_id = %(step_id)s FOR UPDATE;

-- name: lock_steps_of_saga
SELECT * FROM airflow_saga.step WHERE saga_id = %(saga_id)s ORDER BY step_id FOR UPDATE;

-- name: lock_steps_of_request
SELECT s.* FROM airflow_saga.step s JOIN airflow_saga.undo_scope c USING (step_id)
WHERE c.request_id = %(request_id)s ORDER BY s.step_id FOR UPDATE OF s;

-- name: insert_step
INSERT INTO airflow_saga.step (saga_id, task_id, map_index, item_fingerprint, ancestors, mapped_group, state,
    lease_until, ti_id, try_number, max_tries, retries, clear_number, host, pid, dag_version)
VALUES (%(saga_id)s, %(task_id)s, %(map_index)s, %(item_fingerprint)s, %(ancestors)s, %(mapped_group)s, 'RUNNING',
    clock_timestamp() + make_interval(secs => %(lease_seconds)s), %(ti_id)s, %(try_number)s, %(max_tries)s,
    %(retries)s, %(clear_number)s, %(host)s, %(pid)s, %(dag_version)s)
RETURNING *;

-- name: take_step
-- A newer attempt takes the step over: fence + 1, so that the older one may write no intent any more.
UPDATE airflow_saga.step
SET state = 'RUNNING', fence = fence + 1, generation = generation + %(generations)s,
    lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s),
    item_fingerprint = %(item_fingerprint)s, ancestors = %(ancestors)s, mapped_group = %(mapped_group)s,
    ti_id = %(ti_id)s, try_number = %(try_number)s, max_tries = %(max_tries)s, retries = %(retries)s,
    clear_number = %(clear_number)s, host = %(host)s, pid = %(pid)s, dag_version = %(dag_version)s,
    output = NULL, output_lost = false,
    checkpoint = CASE WHEN %(generations)s > 0 THEN NULL ELSE checkpoint END,
    checkpoint_seq = CASE WHEN %(generations)s > 0 THEN 0 ELSE checkpoint_seq END,
    attached_at = clock_timestamp(), changed_at = clock_timestamp(), removed = false
WHERE step_id = %(step_id)s
RETURNING *;

-- name: note_removed
UPDATE airflow_saga.step SET removed = true WHERE step_id = ANY(%(step_ids)s::bigint[]);

-- name: note_attempt_of_finished_step
UPDATE airflow_saga.step SET clear_number = %(clear_number)s, ti_id = %(ti_id)s WHERE step_id = %(step_id)s;

-- name: sweep_step
-- What the attempt before left open. Its call may still take effect until lands_by, which stays. One that waits in the
-- triggerer has no process to lose: it waits on.
UPDATE airflow_saga.action
SET state = 'IN_DOUBT', in_doubt = true, finished_at = clock_timestamp(),
    error = coalesce(error, 'the process that made this call was lost before it reported')
WHERE step_id = %(step_id)s AND state = 'PENDING' AND NOT deferred;

-- name: park_call
-- A call waits in the triggerer from now on, and the attempt that made it ends.
WITH held AS MATERIALIZED (
    SELECT s.fence, s.state FROM airflow_saga.saga g, airflow_saga.step s
    WHERE g.saga_id = %(saga_id)s::bigint AND s.step_id = %(step_id)s::bigint FOR UPDATE OF s
), parked AS (
    UPDATE airflow_saga.action a SET deferred = true, deferral = %(deferral)s, note = %(note)s
    FROM held
    WHERE held.fence = %(fence)s AND held.state IN ('RUNNING', 'STOPPED') AND a.step_id = %(step_id)s
      AND a.generation = %(generation)s AND a.seq = %(seq)s AND a.state = 'PENDING'
    RETURNING a.action_id
)
UPDATE airflow_saga.step s SET state = 'STOPPED', lease_until = NULL, changed_at = clock_timestamp()
FROM parked WHERE s.step_id = %(step_id)s
RETURNING parked.action_id;

-- name: parked_call
SELECT * FROM airflow_saga.action
WHERE step_id = %(step_id)s AND generation = %(generation)s AND state = 'PENDING' AND deferred LIMIT 1;

-- name: note_deferral
-- The step was taken away before its call could be parked: what the undo has to know of it is kept all the same.
UPDATE airflow_saga.action SET deferral = %(deferral)s, note = %(note)s
WHERE step_id = %(step_id)s AND generation = %(generation)s AND seq = %(seq)s AND state IN ('PENDING', 'IN_DOUBT');

-- name: call_over
-- The process that made the call saw it end, whatever it came to: what is still to land lands sooner.
UPDATE airflow_saga.action a
SET lands_by = least(a.lands_by, clock_timestamp() + make_interval(secs => %(settle_seconds)s))
FROM airflow_saga.step s
WHERE s.step_id = %(step_id)s AND s.fence = %(fence)s AND a.step_id = s.step_id AND a.generation = %(generation)s
  AND a.seq = %(seq)s AND a.state = 'IN_DOUBT';

-- name: stop_deferred
-- Its step is undone, or its saga has expired, while a call of it waits in the triggerer: that has begun for certain,
-- and will not be gone on with.
UPDATE airflow_saga.action
SET state = CASE WHEN in_doubt THEN 'IN_DOUBT' ELSE 'DONE' END, deferred = false, lands_by = NULL,
    finished_at = clock_timestamp(), error = coalesce(error, 'stopped while it waited in the triggerer')
WHERE step_id = %(step_id)s AND state = 'PENDING' AND deferred;

-- name: grant_tries
-- A clear grants new tries to what it may resume with. A refusal that the body coped with (it went on to another call)
-- stays one: with another answer now, the body would take another way than the one that is recorded.
UPDATE airflow_saga.action a SET tries_before = tries
WHERE step_id = %(step_id)s AND generation = %(generation)s AND effect <> 'READ_ONLY'
  AND (state = 'IN_DOUBT' OR (state = 'FAILED' AND NOT EXISTS (
      SELECT 1 FROM airflow_saga.action later
      WHERE later.step_id = a.step_id AND later.generation = a.generation AND later.seq > a.seq
        AND later.effect <> 'READ_ONLY' AND NOT later.parallel)));

-- name: lease_is_live
SELECT lease_until IS NOT NULL AND lease_until > clock_timestamp() AS live FROM airflow_saga.step
WHERE step_id = %(step_id)s;

-- name: upstream_steps
SELECT * FROM airflow_saga.step
WHERE saga_id = %(saga_id)s AND task_id = ANY(%(ancestors)s)
  AND (%(mapped_group)s::text IS NULL OR mapped_group IS DISTINCT FROM %(mapped_group)s OR map_index = %(map_index)s);

-- name: finish_step
WITH held AS MATERIALIZED (
    SELECT g.state AS saga_state, s.fence FROM airflow_saga.saga g, airflow_saga.step s
    WHERE g.saga_id = %(saga_id)s::bigint AND s.step_id = %(step_id)s::bigint FOR UPDATE OF s
), ended AS (
    UPDATE airflow_saga.step s
    SET state = 'SUCCEEDED', lease_until = NULL, output = %(output)s, output_lost = %(output_lost)s,
        changed_at = clock_timestamp()
    FROM held WHERE s.step_id = %(step_id)s AND held.fence = %(fence)s AND s.state = 'RUNNING'
      AND NOT EXISTS (SELECT 1 FROM airflow_saga.action a WHERE a.step_id = s.step_id AND a.state = 'PENDING')
    RETURNING s.step_id
)
SELECT EXISTS (SELECT 1 FROM ended) AS done, saga_state,
       CASE WHEN saga_state <> 'RUNNING' THEN pg_notify('airflow_saga_' || %(saga_id)s, 'step') END
FROM held;

-- name: stop_step
WITH held AS MATERIALIZED (
    SELECT g.state AS saga_state, s.fence FROM airflow_saga.saga g, airflow_saga.step s
    WHERE g.saga_id = %(saga_id)s::bigint AND s.step_id = %(step_id)s::bigint FOR UPDATE OF s
), ended AS (
    UPDATE airflow_saga.step s SET state = 'STOPPED', lease_until = NULL, changed_at = clock_timestamp()
    FROM held WHERE s.step_id = %(step_id)s AND held.fence = %(fence)s AND s.state = 'RUNNING'
    RETURNING s.step_id
)
SELECT EXISTS (SELECT 1 FROM ended) AS done, saga_state,
       CASE WHEN saga_state <> 'RUNNING' THEN pg_notify('airflow_saga_' || %(saga_id)s, 'step') END
FROM held;

-- name: savepoint_if_held
-- A place to go back to. A step that is resumed comes past the same place again.
INSERT INTO airflow_saga.savepoint (step_id, generation, seq, name, checkpoint)
SELECT step_id, generation, %(seq)s, %(name)s, %(checkpoint)s FROM airflow_saga.step
WHERE step_id = %(step_id)s AND fence = %(fence)s AND state = 'RUNNING'
ON CONFLICT ON CONSTRAINT one_savepoint_of_a_name DO UPDATE
SET seq = excluded.seq,
    checkpoint = CASE WHEN savepoint.seq = excluded.seq THEN savepoint.checkpoint ELSE excluded.checkpoint END
RETURNING xmax = 0 AS is_new;

-- name: savepoints_of_saga
SELECT p.* FROM airflow_saga.savepoint p JOIN airflow_saga.step s USING (step_id)
WHERE s.saga_id = %(saga_id)s AND p.generation <= s.generation ORDER BY p.savepoint_id;

-- name: carry_savepoints
-- Places before a cut are places of the new generation too.
INSERT INTO airflow_saga.savepoint (step_id, generation, seq, name, checkpoint, made_at)
SELECT p.step_id, s.generation, p.seq, p.name, p.checkpoint, p.made_at
FROM airflow_saga.savepoint p JOIN airflow_saga.step s USING (step_id)
WHERE p.step_id = %(step_id)s AND p.generation = s.generation - 1 AND p.seq <= %(from_seq)s
ON CONFLICT DO NOTHING;

-- name: lose_lease_of_step
-- A process that may not write from a signal handler, or is about to exit, gives its lease back as its last word.
UPDATE airflow_saga.step SET lease_until = clock_timestamp()
WHERE step_id = %(step_id)s AND fence = %(fence)s AND state = 'UNDOING';

-- name: mark_step
UPDATE airflow_saga.step SET state = 'STOPPED', fence = fence + 1, lease_until = NULL, changed_at = clock_timestamp()
WHERE step_id = %(step_id)s AND state = 'RUNNING' RETURNING step_id;

-- name: stop_lost_step
-- The lease ran out and Airflow says the task is not running: its attempt is gone.
UPDATE airflow_saga.step SET state = 'STOPPED', fence = fence + 1, lease_until = NULL, changed_at = clock_timestamp()
WHERE step_id = %(step_id)s AND state = 'RUNNING' AND lease_until <= clock_timestamp() RETURNING step_id;

-- name: sweep_stopped_step
-- A stopped step's call that nobody reported, once it can land no more.
UPDATE airflow_saga.action a
SET state = 'IN_DOUBT', in_doubt = true, finished_at = clock_timestamp(),
    error = coalesce(a.error, 'the process that made this call was lost before it reported')
FROM airflow_saga.step s
WHERE s.step_id = %(step_id)s AND s.state = 'STOPPED' AND a.step_id = s.step_id AND a.state = 'PENDING'
  AND NOT a.deferred AND a.lands_by <= clock_timestamp()
RETURNING a.action_id;

-- name: actions_of_step
SELECT * FROM airflow_saga.action WHERE step_id = %(step_id)s AND generation = %(generation)s ORDER BY seq;

-- name: recorded_calls
-- The fields of RecordedCall, in its order.
SELECT action_id, seq, parallel, name, version, effect, fingerprint, key, state, tries, tries_before, params, result,
       result_lost, error, twin_of
FROM airflow_saga.action WHERE step_id = %(step_id)s AND generation = %(generation)s ORDER BY seq;

-- name: action_by_key
SELECT * FROM airflow_saga.action WHERE step_id = %(step_id)s AND key = %(key)s AND twin_of IS NULL FOR UPDATE;

-- name: action_by_seq
SELECT * FROM airflow_saga.action
WHERE step_id = %(step_id)s AND generation = %(generation)s AND seq = %(seq)s FOR UPDATE;

-- name: lock_action
SELECT * FROM airflow_saga.action WHERE action_id = %(action_id)s FOR UPDATE;

-- name: verified
-- What a probe of an action in doubt said, forward or in the undo; A1 is waited out.
WITH held AS MATERIALIZED (
    SELECT s.fence FROM airflow_saga.saga g, airflow_saga.step s
    WHERE g.saga_id = %(saga_id)s::bigint AND s.step_id = %(step_id)s::bigint FOR SHARE
)
UPDATE airflow_saga.action a
SET state = %(state)s, in_doubt = false, finished_at = clock_timestamp(), note = %(note)s,
    result = CASE WHEN %(state)s = 'DONE' THEN coalesce(%(result)s, a.result) ELSE a.result END,
    result_lost = a.result_lost OR %(result_lost)s
FROM held
WHERE held.fence = %(fence)s AND a.action_id = %(action_id)s AND a.step_id = %(step_id)s AND a.state = 'IN_DOUBT'
  AND (a.lands_by IS NULL OR a.lands_by <= clock_timestamp())
RETURNING a.action_id;

-- name: write_undo
-- The undo's hot path, one commit: how one compensation ended and the intent of the next. Nothing begins out of
-- order (P5), before A1, or without the newest fence.
WITH held AS MATERIALIZED (
    SELECT s.fence, s.state FROM airflow_saga.saga g, airflow_saga.step s
    WHERE g.saga_id = %(saga_id)s::bigint AND s.step_id = %(step_id)s::bigint FOR SHARE
), ended AS (
    UPDATE airflow_saga.action a
    SET state = %(ended_state)s::text, error = %(ended_error)s::text, undo_finished_at = clock_timestamp(),
        undo_failures = undo_failures + %(ended_failures)s::int,
        reconcile_at = CASE WHEN %(reconcile_seconds)s::float8 IS NOT NULL
                            THEN clock_timestamp() + make_interval(secs => %(reconcile_seconds)s::float8) END,
        waiting_for = %(waiting_for)s::text, later_token = coalesce(%(later_token)s::text, a.later_token)
    FROM held
    WHERE held.fence = %(fence)s::int AND held.state = 'UNDOING'
      AND a.action_id = %(ended_id)s::bigint AND a.step_id = %(step_id)s::bigint AND a.state = 'COMPENSATING'
    RETURNING a.action_id
), begun AS (
    UPDATE airflow_saga.action a
    SET state = 'COMPENSATING', undo_tries = undo_tries + 1, undo_key = %(undo_key)s::text, reconcile_at = NULL,
        waiting_for = NULL, error = NULL, probed = false, undo_begun_at = coalesce(undo_begun_at, clock_timestamp()),
        undo_deadline_at = coalesce(undo_deadline_at,
                                    clock_timestamp() + make_interval(secs => %(undo_deadline_seconds)s::float8))
    FROM held
    WHERE held.fence = %(fence)s::int AND held.state = 'UNDOING'
      AND a.action_id = %(begin_id)s::bigint AND a.step_id = %(step_id)s::bigint AND a.effect <> 'READ_ONLY'
      AND a.state IN ('DONE', 'IN_DOUBT', 'COMPENSATING', 'COMPENSATION_FAILED')
      AND (a.lands_by IS NULL OR a.lands_by <= clock_timestamp())
      AND NOT EXISTS (
          SELECT 1 FROM airflow_saga.action later
          WHERE later.step_id = a.step_id AND NOT later.settled
            AND (later.generation, later.seq) > (a.generation, a.seq)
            AND NOT (%(ended_settles)s::bool AND later.action_id IS NOT DISTINCT FROM %(ended_id)s::bigint))
      AND NOT EXISTS (
          SELECT 1 FROM airflow_saga.action later
          WHERE later.step_id = ANY(%(later_step_ids)s::bigint[]) AND NOT later.settled)
      AND (%(ended_id)s::bigint IS NULL OR EXISTS (SELECT 1 FROM ended))
    RETURNING a.action_id, a.undo_tries
)
SELECT fence, state, (SELECT action_id FROM ended) AS ended, (SELECT action_id FROM begun) AS begun,
       (SELECT undo_tries FROM begun) AS tries
FROM held;

-- name: settle_action
-- Moves of the undo that call nothing: declared irreversible, given to a person, or not to be compensated.
WITH held AS MATERIALIZED (
    SELECT s.fence, s.state FROM airflow_saga.saga g, airflow_saga.step s
    WHERE g.saga_id = %(saga_id)s::bigint AND s.step_id = %(step_id)s::bigint FOR SHARE
)
UPDATE airflow_saga.action a
SET state = %(state)s, probed = %(probed)s, error = %(error)s, undo_finished_at = clock_timestamp()
FROM held
WHERE held.fence = %(fence)s AND held.state = 'UNDOING' AND a.action_id = %(action_id)s AND a.step_id = %(step_id)s
  AND a.state = ANY(%(from_states)s) AND (a.lands_by IS NULL OR a.lands_by <= clock_timestamp())
RETURNING a.action_id;

-- name: attach_undo
-- An undo attempt takes a seized step: fence + 1, lease. An older one may begin no compensation any more.
UPDATE airflow_saga.step
SET fence = fence + 1, lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s),
    host = %(host)s, pid = %(pid)s
WHERE step_id = %(step_id)s AND state = 'UNDOING'
RETURNING *;

-- name: unsettled_of_steps
SELECT s.task_id, s.map_index, a.name, a.seq, a.state FROM airflow_saga.action a
JOIN airflow_saga.step s USING (step_id)
WHERE a.step_id = ANY(%(step_ids)s::bigint[]) AND NOT a.settled ORDER BY a.action_id LIMIT 20;

-- name: unsettled_actions
SELECT * FROM airflow_saga.action WHERE step_id = %(step_id)s AND NOT settled ORDER BY generation DESC, seq DESC;

-- name: read_action
SELECT *, clock_timestamp() AS now FROM airflow_saga.action WHERE action_id = %(action_id)s;

-- name: now_row
SELECT clock_timestamp() AS now;

-- name: read_action_row
SELECT * FROM airflow_saga.action WHERE action_id = %(action_id)s;

-- name: seize_step
-- What is undone as a whole has no checkpoint to go on from.
UPDATE airflow_saga.step
SET state = 'UNDOING', fence = fence + 1, lease_until = NULL, changed_at = clock_timestamp(),
    checkpoint = CASE WHEN NOT %(whole)s THEN checkpoint END,
    checkpoint_seq = CASE WHEN %(whole)s THEN 0 ELSE checkpoint_seq END
WHERE step_id = %(step_id)s;

-- name: reset_for_undo
-- An undo that somebody asked for gives new tries to actions that an earlier one gave up, and probes again what nobody
-- could tell. One that only goes on (a date fell due, a late answer) leaves to people what was left to people.
UPDATE airflow_saga.action
SET undo_failures = CASE WHEN %(goes_on)s THEN undo_failures ELSE 0 END,
    probed = probed AND %(goes_on)s,
    undo_deadline_at = CASE WHEN %(goes_on)s THEN undo_deadline_at END,
    undo_finished_at = CASE WHEN %(goes_on)s THEN undo_finished_at END,
    reconcile_at = CASE WHEN %(goes_on)s AND reconcile_at > clock_timestamp() THEN reconcile_at END,
    kept = CASE WHEN %(goes_on)s THEN kept
                ELSE seq < %(from_seq)s
                     AND generation = (SELECT s.generation FROM airflow_saga.step s WHERE s.step_id = action.step_id) END
WHERE step_id = %(step_id)s AND residual;

-- name: give_new_tries
-- A person asks for this one again; the others of its step stay as an undo has left them.
UPDATE airflow_saga.action
SET undo_failures = 0, probed = false, undo_deadline_at = NULL, undo_finished_at = NULL, reconcile_at = NULL
WHERE action_id = %(action_id)s AND residual;

-- name: cut_step
-- Only a part of it is undone: what stands before that part goes over into a new generation, with its keys.
WITH cut AS (
    UPDATE airflow_saga.step SET generation = generation + 1, checkpoint = %(checkpoint)s,
        checkpoint_seq = CASE WHEN %(checkpoint)s::text IS NULL THEN 0 ELSE least(checkpoint_seq, %(from_seq)s) END
    WHERE step_id = %(step_id)s RETURNING step_id, generation
)
UPDATE airflow_saga.action a SET generation = cut.generation FROM cut
WHERE a.step_id = cut.step_id AND a.generation = cut.generation - 1 AND a.seq < %(from_seq)s;

-- name: goes_on_from_a_part
SELECT EXISTS (SELECT 1 FROM airflow_saga.action
               WHERE step_id = %(step_id)s AND generation = %(generation)s AND kept) AS kept;

-- name: let_go_of_kept
UPDATE airflow_saga.action SET kept = false WHERE step_id = %(step_id)s AND kept;

-- name: end_undo_of_step
UPDATE airflow_saga.step
SET state = CASE WHEN EXISTS (SELECT 1 FROM airflow_saga.action a
                              WHERE a.step_id = step.step_id AND a.residual AND NOT a.kept)
                 THEN 'PARTLY_UNDONE' ELSE 'UNDONE' END,
    lease_until = NULL, changed_at = clock_timestamp()
WHERE step_id = %(step_id)s AND state = 'UNDOING';

-- name: expire_step
UPDATE airflow_saga.step
SET state = CASE WHEN EXISTS (SELECT 1 FROM airflow_saga.action a
                              WHERE a.step_id = step.step_id AND a.residual AND NOT a.kept)
                 THEN 'PARTLY_UNDONE' ELSE 'UNDONE' END,
    fence = fence + 1, lease_until = NULL, changed_at = clock_timestamp()
WHERE step_id = %(step_id)s AND state IN ('RUNNING', 'STOPPED', 'SUCCEEDED', 'UNDOING', 'UNDONE');

-- name: left_by_undo
-- What stands though it was to be undone, and what stands since no undo was to take it away.
SELECT count(*) FILTER (WHERE s.state = 'PARTLY_UNDONE' AND NOT a.kept) > 0 AS failed, count(*) > 0 AS kept
FROM airflow_saga.step s JOIN airflow_saga.action a USING (step_id)
WHERE s.saga_id = %(saga_id)s AND a.residual;

-- name: step_has_residual
SELECT EXISTS (SELECT 1 FROM airflow_saga.action WHERE step_id = %(step_id)s AND residual) AS stands;

-- name: unsettled_of_request
SELECT a.* FROM airflow_saga.action a JOIN airflow_saga.undo_scope c USING (step_id)
WHERE c.request_id = %(request_id)s AND NOT a.settled ORDER BY a.action_id;

-- name: halted_of_request
SELECT EXISTS (SELECT 1 FROM airflow_saga.action a JOIN airflow_saga.undo_scope c USING (step_id)
WHERE c.request_id = %(request_id)s AND a.state = 'COMPENSATION_FAILED' AND a.settled) AS halted;

-- name: actions_of_steps
SELECT * FROM airflow_saga.action WHERE step_id = ANY(%(step_ids)s::bigint[]) AND residual;

-- name: open_request
SELECT * FROM airflow_saga.undo_request
WHERE saga_id = %(saga_id)s AND state IN ('HINTED', 'HELD', 'REQUESTED', 'FROZEN') FOR UPDATE;

-- name: queued_request
SELECT * FROM airflow_saga.undo_request WHERE saga_id = %(saga_id)s AND state = 'QUEUED' FOR UPDATE;

-- name: lock_request
SELECT * FROM airflow_saga.undo_request WHERE request_uuid = %(request_uuid)s FOR UPDATE;

-- name: find_request
SELECT * FROM airflow_saga.undo_request WHERE request_uuid = %(request_uuid)s;

-- name: insert_request
INSERT INTO airflow_saga.undo_request (saga_id, number, whole_run, state, cause, actor, reason, clear_number, stop_now,
                                       deadline_at)
SELECT %(saga_id)s, 1 + coalesce(max(number), 0), %(whole_run)s, %(state)s, %(cause)s, %(actor)s, %(reason)s,
       %(clear_number)s, %(stop_now)s, clock_timestamp() + make_interval(secs => %(deadline_seconds)s)
FROM airflow_saga.undo_request WHERE saga_id = %(saga_id)s
RETURNING *;

-- name: insert_scope
INSERT INTO airflow_saga.undo_scope (request_id, step_id, from_seq) VALUES (%(request_id)s, %(step_id)s, %(from_seq)s)
ON CONFLICT (request_id, step_id) DO UPDATE
SET from_seq = least(undo_scope.from_seq, excluded.from_seq),
    checkpoint = CASE WHEN excluded.from_seq >= undo_scope.from_seq THEN undo_scope.checkpoint END;

-- name: keep_checkpoint_of_scope
UPDATE airflow_saga.undo_scope SET checkpoint = %(checkpoint)s
WHERE request_id = %(request_id)s AND step_id = %(step_id)s AND from_seq = %(from_seq)s;

-- name: scope_of_request
SELECT step_id, from_seq, checkpoint FROM airflow_saga.undo_scope WHERE request_id = %(request_id)s;

-- name: move_request
UPDATE airflow_saga.undo_request
SET state = %(state)s,
    ended_at = CASE WHEN %(state)s IN ('SETTLED', 'WITHDRAWN', 'EXPIRED') THEN clock_timestamp() END
WHERE request_id = %(request_id)s RETURNING *;

-- name: widen_request
UPDATE airflow_saga.undo_request
SET state = %(state)s, whole_run = whole_run OR %(whole_run)s, cause = %(cause)s, actor = %(actor)s,
    reason = %(reason)s, stop_now = stop_now OR %(stop_now)s, clear_number = greatest(clear_number, %(clear_number)s)
WHERE request_id = %(request_id)s RETURNING *;

-- name: freeze_request
UPDATE airflow_saga.undo_request
SET state = 'FROZEN', plan = %(plan)s, plan_hash = %(plan_hash)s, owner_run_id = %(owner_run_id)s,
    owner_lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s), frozen_at = clock_timestamp()
WHERE request_id = %(request_id)s RETURNING *;

-- name: fence_steps_of_request
UPDATE airflow_saga.step SET fence = fence + 1, lease_until = NULL
WHERE state = 'UNDOING' AND step_id IN (SELECT step_id FROM airflow_saga.undo_scope WHERE request_id = %(request_id)s);

-- name: own_request
UPDATE airflow_saga.undo_request
SET owner_run_id = %(owner_run_id)s, owner_lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
WHERE request_id = %(request_id)s RETURNING *;

-- name: owner_lease_is_live
SELECT owner_lease_until IS NOT NULL AND owner_lease_until > clock_timestamp() AS live
FROM airflow_saga.undo_request WHERE request_id = %(request_id)s;

-- name: running_leases
SELECT s.* FROM airflow_saga.step s
WHERE s.saga_id = %(saga_id)s AND s.state = 'RUNNING' AND s.lease_until > clock_timestamp()
  AND (%(step_ids)s::bigint[] IS NULL OR s.step_id = ANY(%(step_ids)s::bigint[]))
ORDER BY s.step_id;

-- name: note_event
INSERT INTO airflow_saga.event (saga_id, step_id, action_id, request_id, what, actor, detail)
VALUES (%(saga_id)s, %(step_id)s, %(action_id)s, %(request_id)s, %(what)s, %(actor)s, %(detail)s);

-- name: wake
SELECT pg_notify('airflow_saga_' || %(saga_id)s, %(what)s);

-- name: reopen_action
-- What a late answer changes; undo_key and the probe start anew. Only the newest try's own answer ends A1.
UPDATE airflow_saga.action
SET state = %(state)s, in_doubt = %(in_doubt)s, result = coalesce(%(result)s, result), probed = false,
    result_lost = %(result_lost)s, reopened = reopened + %(reopened)s, error = %(error)s, reconcile_at = NULL,
    undo_failures = 0, undo_deadline_at = NULL, finished_at = clock_timestamp(),
    lands_by = CASE WHEN %(landed)s THEN NULL ELSE lands_by END
WHERE action_id = %(action_id)s;

-- name: insert_twin
-- Its seq is far above those that a running attempt still counts up to.
INSERT INTO airflow_saga.action (saga_id, step_id, generation, seq, parallel, name, version, effect, fingerprint, key,
                                 state, tries, params, result, result_lost, begun_at, finished_at, twin_of)
SELECT saga_id, step_id, generation,
       (SELECT greatest(max(seq) + 1, 1 << 30) FROM airflow_saga.action m WHERE m.step_id = a.step_id AND m.generation = a.generation),
       parallel, name, version, effect, fingerprint, key, 'DONE', %(tries)s, params, %(result)s, %(result_lost)s,
       begun_at, clock_timestamp(), action_id
FROM airflow_saga.action a WHERE action_id = %(action_id)s
RETURNING *;

-- name: reopened_steps
-- Steps in which a late answer showed an effect that nobody has undone or put before a person yet.
SELECT DISTINCT s.step_id FROM airflow_saga.step s JOIN airflow_saga.action a USING (step_id)
WHERE s.saga_id = %(saga_id)s AND s.state = 'PARTLY_UNDONE' AND NOT a.settled;

-- name: step_partly_undone
UPDATE airflow_saga.step SET state = 'PARTLY_UNDONE', changed_at = clock_timestamp()
WHERE step_id = %(step_id)s AND state = 'UNDONE';

-- name: resolve_action
UPDATE airflow_saga.action
SET state = %(state)s, note = %(note)s, reconcile_at = NULL, in_doubt = false, finished_at = clock_timestamp(),
    result = CASE WHEN %(state)s = 'DONE' THEN coalesce(%(result)s, result) ELSE result END
WHERE action_id = %(action_id)s RETURNING action_id;

-- name: step_resolved
UPDATE airflow_saga.step SET state = 'UNDONE', changed_at = clock_timestamp()
WHERE step_id = %(step_id)s AND state = 'PARTLY_UNDONE'
  AND NOT EXISTS (SELECT 1 FROM airflow_saga.action a
                  WHERE a.step_id = step.step_id AND a.residual AND NOT a.kept);

-- name: claim_notice
INSERT INTO airflow_saga.notice (request_id, kind) VALUES (%(request_id)s, %(kind)s)
ON CONFLICT DO NOTHING RETURNING request_id;

-- name: note_component
INSERT INTO airflow_saga.component (kind, host, version, last_hook, last_hook_at)
VALUES (%(kind)s, %(host)s, %(version)s, %(hook)s, CASE WHEN %(hook)s::text IS NOT NULL THEN clock_timestamp() END)
ON CONFLICT (kind, host) DO UPDATE
SET version = excluded.version, seen_at = clock_timestamp(),
    last_hook = coalesce(excluded.last_hook, component.last_hook),
    last_hook_at = coalesce(excluded.last_hook_at, component.last_hook_at);

-- name: note_triggered
UPDATE airflow_saga.undo_request SET triggered_at = clock_timestamp() WHERE request_uuid = %(request_uuid)s;

-- name: saga_by_run
SELECT * FROM airflow_saga.saga WHERE dag_id = %(dag_id)s AND run_id = %(run_id)s;

-- name: saga_by_id
SELECT * FROM airflow_saga.saga WHERE saga_id = %(saga_id)s;

-- name: list_sagas
SELECT g.*, (SELECT count(*) FROM airflow_saga.step s JOIN airflow_saga.action a USING (step_id)
             WHERE s.saga_id = g.saga_id AND a.residual AND (g.state IN ('PARTIALLY_CANCELLED', 'CANCELLING'))) AS standing
FROM airflow_saga.saga g
WHERE (%(dag_ids)s::text[] IS NULL OR g.dag_id = ANY(%(dag_ids)s::text[])) AND (%(states)s::text[] IS NULL OR g.state = ANY(%(states)s))
ORDER BY g.saga_id DESC LIMIT %(limit)s;

-- name: steps_of_saga
SELECT * FROM airflow_saga.step WHERE saga_id = %(saga_id)s ORDER BY attached_at, step_id;

-- name: all_actions_of_saga
SELECT * FROM airflow_saga.action
WHERE step_id IN (SELECT step_id FROM airflow_saga.step WHERE saga_id = %(saga_id)s) ORDER BY action_id;

-- name: residual_of_saga
SELECT a.* FROM airflow_saga.step s JOIN airflow_saga.action a USING (step_id)
WHERE s.saga_id = %(saga_id)s AND a.residual ORDER BY a.action_id;

-- name: requests_of_saga
SELECT * FROM airflow_saga.undo_request WHERE saga_id = %(saga_id)s ORDER BY number;

-- name: events_of_saga
SELECT * FROM airflow_saga.event WHERE saga_id = %(saga_id)s ORDER BY event_id;

-- name: step_of_saga
SELECT * FROM airflow_saga.step WHERE saga_id = %(saga_id)s AND task_id = %(task_id)s AND map_index = %(map_index)s;

-- name: indexes_to_undo
SELECT DISTINCT s.map_index FROM airflow_saga.step s JOIN airflow_saga.undo_scope c USING (step_id)
JOIN airflow_saga.action a USING (step_id)
WHERE c.request_id = %(request_id)s AND s.task_id = %(task_id)s AND a.residual AND NOT a.kept ORDER BY 1;

-- name: requests_to_trigger
-- Requests that no live undo run carries out yet, or whose run has been silent for a while.
SELECT r.*, g.dag_id, g.run_id FROM airflow_saga.undo_request r JOIN airflow_saga.saga g USING (saga_id)
WHERE r.state IN ('HINTED', 'REQUESTED', 'FROZEN')
  AND (r.triggered_at IS NULL OR r.triggered_at < clock_timestamp() - make_interval(secs => %(silent_seconds)s))
  AND (r.owner_lease_until IS NULL OR r.owner_lease_until < clock_timestamp())
ORDER BY r.request_id LIMIT %(limit)s;

-- name: sagas_to_read
-- Sagas whose Airflow run the reconciler has to look at: nobody has told their end yet.
SELECT * FROM airflow_saga.saga g
WHERE g.state IN ('PENDING', 'RUNNING') AND g.saga_id > %(after_id)s
   OR g.state = 'FAILED' AND g.saga_id > %(after_id)s AND g.on_failure = 'compensate'
      AND coalesce(g.cause, '') NOT IN ('incomplete', 'refused')
      AND NOT EXISTS (SELECT 1 FROM airflow_saga.undo_request r
                      WHERE r.saga_id = g.saga_id AND r.state IN ('HINTED', 'HELD', 'REQUESTED', 'FROZEN', 'QUEUED'))
ORDER BY g.saga_id LIMIT %(limit)s;

-- name: lost_leases
-- Steps whose attempt may be gone, and stopped ones with a call that nobody reported and that can land no more.
SELECT s.*, g.dag_id, g.run_id FROM airflow_saga.step s JOIN airflow_saga.saga g USING (saga_id)
WHERE s.state IN ('RUNNING', 'STOPPED')
  AND (s.state = 'RUNNING' AND s.lease_until <= clock_timestamp() OR s.state = 'STOPPED' AND EXISTS (
       SELECT 1 FROM airflow_saga.action a
       WHERE a.step_id = s.step_id AND a.state = 'PENDING' AND NOT a.deferred AND a.lands_by <= clock_timestamp()))
ORDER BY s.step_id LIMIT %(limit)s;

-- name: lost_a_worker
SELECT 1 FROM airflow_saga.event e JOIN airflow_saga.step s USING (step_id)
WHERE e.saga_id = %(saga_id)s AND e.what LIKE 'step lost%%' AND s.state = 'STOPPED' LIMIT 1;

-- name: sagas_past_deadline
SELECT * FROM airflow_saga.saga WHERE state = 'CANCELLING' AND mode = 'undo' AND deadline_at <= clock_timestamp()
ORDER BY saga_id LIMIT %(limit)s;

-- name: sagas_to_suspend
SELECT g.* FROM airflow_saga.saga g WHERE g.state = 'CANCELLING' AND g.mode = 'keep'
  AND NOT EXISTS (SELECT 1 FROM airflow_saga.step s WHERE s.saga_id = g.saga_id AND s.state = 'RUNNING'
                  AND s.lease_until > clock_timestamp())
ORDER BY saga_id LIMIT %(limit)s;

-- name: due_actions
SELECT DISTINCT g.saga_id, g.dag_id, g.run_id, g.state FROM airflow_saga.action a
JOIN airflow_saga.saga g USING (saga_id) JOIN airflow_saga.step s USING (step_id)
WHERE a.reconcile_at <= clock_timestamp() AND s.state = 'PARTLY_UNDONE'
  AND NOT EXISTS (SELECT 1 FROM airflow_saga.undo_request r WHERE r.saga_id = g.saga_id
                  AND r.state IN ('HINTED', 'HELD', 'REQUESTED', 'FROZEN'))
ORDER BY g.saga_id LIMIT %(limit)s;

-- name: due_steps_of_saga
SELECT DISTINCT a.step_id FROM airflow_saga.action a JOIN airflow_saga.step s USING (step_id)
WHERE a.saga_id = %(saga_id)s AND a.reconcile_at <= clock_timestamp() AND s.state = 'PARTLY_UNDONE';

-- name: recent_hints
SELECT count(DISTINCT saga_id) AS sagas FROM airflow_saga.undo_request
WHERE state IN ('HINTED', 'HELD') AND cause = ANY(%(causes)s)
  AND asked_at > clock_timestamp() - make_interval(secs => %(window_seconds)s);

-- name: lock_sagas_with_recent_hints
SELECT saga_id FROM airflow_saga.saga WHERE saga_id IN (
    SELECT r.saga_id FROM airflow_saga.undo_request r WHERE r.state = 'HINTED' AND r.cause = ANY(%(causes)s)
      AND r.asked_at > clock_timestamp() - make_interval(secs => %(window_seconds)s))
ORDER BY saga_id FOR UPDATE;

-- name: hold_hints
-- What a person has released is not held again.
UPDATE airflow_saga.undo_request r SET state = 'HELD'
WHERE r.saga_id = ANY(%(saga_ids)s) AND r.state = 'HINTED' AND r.cause = ANY(%(causes)s)
  AND NOT EXISTS (SELECT 1 FROM airflow_saga.event e WHERE e.saga_id = r.saga_id AND e.request_id = r.request_id
                  AND e.what = 'undo released')
RETURNING *;

-- name: components
SELECT * FROM airflow_saga.component ORDER BY kind, host;

-- name: bury_old_sagas
-- Before anything of them is deleted: whoever looks later finds a grave, not a saga that did nothing.
UPDATE airflow_saga.saga SET pruned_at = clock_timestamp() WHERE saga_id IN (
    SELECT g.saga_id FROM airflow_saga.saga g
    WHERE g.state IN ('COMPLETED', 'CANCELLED', 'FAILED') AND g.pruned_at IS NULL
      AND g.changed_at < clock_timestamp() - make_interval(days => %(retention_days)s)
      AND NOT EXISTS (SELECT 1 FROM airflow_saga.undo_request r
                      WHERE r.saga_id = g.saga_id AND r.state IN ('HINTED', 'HELD', 'REQUESTED', 'QUEUED', 'FROZEN'))
    ORDER BY g.saga_id LIMIT %(batch)s FOR UPDATE SKIP LOCKED)
RETURNING saga_id;

-- name: prune_actions
DELETE FROM airflow_saga.action WHERE action_id IN (
    SELECT a.action_id FROM airflow_saga.saga g JOIN airflow_saga.step s USING (saga_id)
    JOIN airflow_saga.action a USING (step_id)
    WHERE g.pruned_at IS NOT NULL
    LIMIT %(batch)s)
RETURNING action_id;
