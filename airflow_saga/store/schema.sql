-- The saga store. Names of DAGs, runs and tasks stand in saga and step only; everything else hangs on bigint keys.
-- Values (params, results, outputs) are tagged JSON text, not jsonb: jsonb refuses NUL and lone surrogates.
-- The triggers that refuse illegal moves are made from the tables in airflow_saga.core.states, see migrate.py.

CREATE TABLE airflow_saga.saga (
    saga_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    saga_uuid uuid NOT NULL DEFAULT gen_random_uuid(),
    dag_id text NOT NULL,
    run_id text NOT NULL,
    state text NOT NULL,
    mode text,
    cause text,
    actor text,
    reason text,
    clear_number integer NOT NULL DEFAULT 0,
    stop_clear_number integer NOT NULL DEFAULT -1,
    on_failure text NOT NULL DEFAULT 'compensate',
    on_compensation_failure text NOT NULL DEFAULT 'continue',
    cancel_deadline_seconds double precision NOT NULL DEFAULT 3600,
    deadline_at timestamptz,
    stop_now boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT one_saga_per_run UNIQUE (dag_id, run_id),
    CONSTRAINT mode_iff_cancelling CHECK ((mode IS NOT NULL) = (state = 'CANCELLING')),
    CONSTRAINT mode_known CHECK (mode IN ('undo', 'keep')),
    CONSTRAINT on_failure_known CHECK (on_failure IN ('compensate', 'keep')),
    CONSTRAINT on_compensation_failure_known CHECK (on_compensation_failure IN ('continue', 'halt'))
);
CREATE INDEX saga_open ON airflow_saga.saga (state, saga_id) WHERE state NOT IN ('COMPLETED', 'CANCELLED');

CREATE TABLE airflow_saga.step (
    step_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    saga_id bigint NOT NULL REFERENCES airflow_saga.saga ON DELETE CASCADE,
    task_id text NOT NULL,
    map_index integer NOT NULL,
    item_fingerprint text,
    ancestors text[] NOT NULL DEFAULT '{}',
    mapped_group text,
    state text NOT NULL,
    generation integer NOT NULL DEFAULT 1,
    fence integer NOT NULL DEFAULT 1,
    lease_until timestamptz,
    ti_id uuid,
    try_number integer NOT NULL,
    max_tries integer NOT NULL,
    retries integer NOT NULL,
    clear_number integer NOT NULL,
    host text,
    pid integer,
    dag_version text,
    output text,
    output_lost boolean NOT NULL DEFAULT false,
    checkpoint text,
    attached_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT one_step_per_task_instance UNIQUE (saga_id, task_id, map_index),
    CONSTRAINT fence_grows_from_one CHECK (fence >= 1),
    CONSTRAINT generation_grows_from_one CHECK (generation >= 1),
    CONSTRAINT running_step_has_lease CHECK (state <> 'RUNNING' OR lease_until IS NOT NULL)
) WITH (fillfactor = 70);
CREATE INDEX step_unfinished ON airflow_saga.step (step_id) WHERE state IN ('RUNNING', 'STOPPED');

-- The hot table: no foreign key and no CHECK, each would cost a tenth of a write; its trigger checks states and effects.
CREATE TABLE airflow_saga.action (
    action_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    saga_id bigint NOT NULL,
    step_id bigint NOT NULL,
    generation integer NOT NULL,
    seq integer NOT NULL,
    parallel boolean NOT NULL DEFAULT false,
    name text NOT NULL,
    version integer NOT NULL,
    effect text NOT NULL,
    fingerprint text NOT NULL,
    key text NOT NULL,
    state text NOT NULL,
    in_doubt boolean NOT NULL DEFAULT false,
    tries integer NOT NULL DEFAULT 1,
    tries_before integer NOT NULL DEFAULT 0,
    params text NOT NULL,
    result text,
    result_lost boolean NOT NULL DEFAULT false,
    error text,
    lands_by timestamptz,
    begun_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz,
    undo_key text,
    undo_tries integer NOT NULL DEFAULT 0,
    undo_failures integer NOT NULL DEFAULT 0,
    undo_begun_at timestamptz,
    undo_finished_at timestamptz,
    undo_deadline_at timestamptz,
    reconcile_at timestamptz,
    waiting_for text,
    later_token text,
    probed boolean NOT NULL DEFAULT false,
    reopened integer NOT NULL DEFAULT 0,
    twin_of bigint,
    note text,
    settled boolean NOT NULL,  -- for the order of an undo; this and residual are computed by the table's trigger
    residual boolean NOT NULL,  -- an effect that stands, or may
    CONSTRAINT one_action_per_seq UNIQUE (step_id, generation, seq)
) WITH (fillfactor = 80);
-- One index for both questions, by step: a second one would cost each action as much as its trigger.
CREATE INDEX action_open ON airflow_saga.action (step_id, generation, seq) WHERE NOT settled OR residual;
CREATE INDEX action_due ON airflow_saga.action (reconcile_at) WHERE reconcile_at IS NOT NULL;

CREATE TABLE airflow_saga.undo_request (
    request_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    request_uuid uuid NOT NULL DEFAULT gen_random_uuid() UNIQUE,
    saga_id bigint NOT NULL REFERENCES airflow_saga.saga ON DELETE CASCADE,
    number integer NOT NULL,
    whole_run boolean NOT NULL,
    state text NOT NULL,
    cause text NOT NULL,
    actor text NOT NULL,
    reason text,
    clear_number integer NOT NULL,
    stop_now boolean NOT NULL DEFAULT false,
    plan jsonb,
    plan_hash text,
    owner_run_id text,
    owner_lease_until timestamptz,
    triggered_at timestamptz,
    deadline_at timestamptz,
    asked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    frozen_at timestamptz,
    ended_at timestamptz,
    CONSTRAINT request_numbers_count UNIQUE (saga_id, number),
    CONSTRAINT frozen_has_a_plan CHECK (state NOT IN ('FROZEN', 'SETTLED') OR plan IS NOT NULL)
);
CREATE UNIQUE INDEX one_open_request_per_saga ON airflow_saga.undo_request (saga_id)
    WHERE state IN ('HINTED', 'HELD', 'REQUESTED', 'FROZEN');
CREATE UNIQUE INDEX one_queued_request_per_saga ON airflow_saga.undo_request (saga_id) WHERE state = 'QUEUED';

CREATE TABLE airflow_saga.undo_scope (
    request_id bigint NOT NULL REFERENCES airflow_saga.undo_request ON DELETE CASCADE,
    step_id bigint NOT NULL REFERENCES airflow_saga.step ON DELETE CASCADE,
    from_seq integer NOT NULL DEFAULT 0,
    PRIMARY KEY (request_id, step_id)
);

-- Who decided what, and what surprised us. Begin and succeed of an action are on its own row, not here.
CREATE TABLE airflow_saga.event (
    event_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    saga_id bigint NOT NULL REFERENCES airflow_saga.saga ON DELETE CASCADE,
    step_id bigint REFERENCES airflow_saga.step ON DELETE CASCADE,
    action_id bigint REFERENCES airflow_saga.action ON DELETE CASCADE,
    request_id bigint REFERENCES airflow_saga.undo_request ON DELETE CASCADE,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    what text NOT NULL,
    actor text NOT NULL,
    detail text
);
CREATE INDEX event_of_saga ON airflow_saga.event (saga_id, event_id);
CREATE INDEX event_of_action ON airflow_saga.event (action_id) WHERE action_id IS NOT NULL;

-- A person is told once per request and kind.
CREATE TABLE airflow_saga.notice (
    request_id bigint NOT NULL REFERENCES airflow_saga.undo_request ON DELETE CASCADE,
    kind text NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (request_id, kind)
);

-- Which Airflow processes have the plugin, and when a hook was last called in them (read by doctor).
CREATE TABLE airflow_saga.component (
    kind text NOT NULL,
    host text NOT NULL,
    version text NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_hook text,
    last_hook_at timestamptz,
    PRIMARY KEY (kind, host)
);

CREATE FUNCTION airflow_saga.refuse_cancelled_with_residual() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM airflow_saga.step s JOIN airflow_saga.action a USING (step_id)
               WHERE s.saga_id = NEW.saga_id AND a.residual) THEN
        RAISE EXCEPTION 'saga % has effects that stand, or may stand: it cannot be CANCELLED', NEW.saga_id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'cancelled_means_nothing_stands';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER cancelled_means_nothing_stands BEFORE INSERT OR UPDATE OF state ON airflow_saga.saga
    FOR EACH ROW WHEN (NEW.state = 'CANCELLED') EXECUTE FUNCTION airflow_saga.refuse_cancelled_with_residual();
