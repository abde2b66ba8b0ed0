#!/usr/bin/env bash
# Run by the image of Postgres when its volume is new: Airflow's metadata and the saga store, each with its own owner.
set -euo pipefail

psql --username "$POSTGRES_USER" --dbname postgres --no-psqlrc --quiet \
	--set ON_ERROR_STOP=1 --set password="$POSTGRES_PASSWORD" <<'SQL'
CREATE ROLE airflow LOGIN PASSWORD :'password';
CREATE DATABASE airflow OWNER airflow;
CREATE ROLE saga LOGIN PASSWORD :'password';
CREATE DATABASE saga OWNER saga;
\connect saga
-- For the demo rag_index, which may use it but not add it.
CREATE EXTENSION vector;
SQL
