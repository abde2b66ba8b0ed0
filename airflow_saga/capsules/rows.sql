-- Statements on rows of users' tables. {table}, {columns} and so on are quoted names, {values} and {where} placeholders.

-- name: insert
INSERT INTO {table} ({columns}) VALUES ({values}) RETURNING *;

-- name: find
SELECT * FROM {table} WHERE {where};

-- name: find_for_update
SELECT * FROM {table} WHERE {where} FOR UPDATE;

-- name: change
UPDATE {table} SET {assignments} WHERE {where} RETURNING *;

-- name: remove
DELETE FROM {table} WHERE {where};
