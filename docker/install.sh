#!/usr/bin/env bash
# What the image installs, into a virtual environment: docker/install.sh DIRECTORY
#
# The tests run this same script on a plain machine, since they cannot build the image. It needs a Python that is
# supported (PYTHON, else python3) and nothing else: no compiler, no package of a distribution.
set -euo pipefail

venv=${1:?usage: install.sh DIRECTORY}
python=${PYTHON:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
constraints=$root/constraints/constraints-$version.txt

# The demo asks for these: agents and the client of their model, Celery with its queue in Redis, the embedding model.
extras=ai,celery,rag
client='pydantic-ai-slim[openai]'

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Only to install: uv comes out of the same constraints, makes the long list quick, and does not stay.
"$python" -m venv "$scratch/tools"
"$scratch/tools/bin/pip" install --quiet --disable-pip-version-check --constraint "$constraints" uv
uv=$scratch/tools/bin/uv

# Away from whatever uv would take for this project's settings, and from a build/ that an earlier build left behind.
mkdir "$scratch/source"
cp -R "$root"/{setup.cfg,pyproject.toml,README.md,LICENSE,airflow_saga} "$scratch/source"
cd "$scratch"
"$uv" build --quiet --wheel --build-constraints "$constraints" --out-dir "$scratch" "$scratch/source"
wheel=$(echo "$scratch"/airflow_saga-*.whl)

"$uv" venv --quiet --python "$python" "$venv"
# Wheels only, so that a missing compiler is noticed everywhere. Compiled here, not by each process at each start.
"$uv" pip install --quiet --python "$venv/bin/python" --only-binary :all: --compile-bytecode \
	--constraint "$constraints" "airflow-saga[$extras] @ file://$wheel" "$client"
