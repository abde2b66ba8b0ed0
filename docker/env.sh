#!/usr/bin/env bash
# Makes docker/.env with fresh secrets for compose.yaml, once: docker/env.sh [FILE]
#
# The volume of Postgres keeps the password that it was made with, so a file that is there is left alone.
set -euo pipefail

file=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/.env}
if [ -e "$file" ]; then
	echo "$file is there already and was left as it is"
	exit
fi

hex() { # hexadecimal, so that it may stand in a URL
	head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n'
}

umask 077
{
	echo "POSTGRES_PASSWORD=$(hex)"
	echo "API_SECRET_KEY=$(hex)"
	echo "JWT_SECRET=$(hex)$(hex)"
	# Fernet wants 32 bytes as URL-safe base64.
	echo "FERNET_KEY=$(head -c 32 /dev/urandom | base64 | tr '+/' '-_')"
} >"$file.new"
mv "$file.new" "$file"
echo "$file: made"
