-- The receipts of statements, in users' own databases. {p} is the placeholder of the driver; what is %s is Postgres only.

-- Safe to run again.
-- name: make_table
CREATE TABLE IF NOT EXISTS airflow_saga_receipts (
    receipt_key varchar(200) NOT NULL PRIMARY KEY,
    made_at timestamp with time zone NOT NULL DEFAULT CURRENT_TIMESTAMP,
    result text,
    undone_by varchar(200)
);

-- name: find
SELECT result, undone_by FROM airflow_saga_receipts WHERE receipt_key = {p};

-- Waits for whoever holds the key in a transaction that has not ended.
-- name: take
INSERT INTO airflow_saga_receipts (receipt_key) VALUES ({p});

-- name: keep_result
UPDATE airflow_saga_receipts SET result = {p} WHERE receipt_key = {p};

-- Claims the undo of an effect that stands.
-- name: mark_undone
UPDATE airflow_saga_receipts SET undone_by = {p} WHERE receipt_key = {p} AND undone_by IS NULL;

-- A key that was never used is used up by its undo: an attempt that was lost on its way finds it so.
-- name: use_up
INSERT INTO airflow_saga_receipts (receipt_key, undone_by) VALUES ({p}, {p});

-- The server ends by itself what its client has given up, so that nobody waits for the key for long. A stricter limit
-- of the database's own stays.
-- name: limit_on_postgres
SELECT set_config(name, CASE name WHEN 'client_connection_check_interval' THEN '1000' ELSE %(ms)s::text END, true)
FROM pg_settings
WHERE name IN ('client_connection_check_interval', 'statement_timeout', 'idle_in_transaction_session_timeout')
  AND (setting::bigint = 0 OR setting::bigint > %(ms)s);
