#!/usr/bin/env bash
# PostgreSQL's programs for the tests of checkpoints in a database: those that are there, else Debian's.
set -euo pipefail
if command -v initdb > /dev/null || compgen -G "/usr/lib/postgresql/*/bin/initdb" > /dev/null; then exit 0; fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
    echo "The tests of checkpoints need PostgreSQL: install it (apt-get install postgresql) and run make test again." >&2
    exit 1
fi
echo "Installing PostgreSQL"
{ apt-get install -y -qq postgresql || { apt-get update -qq && apt-get install -y -qq postgresql; }; } > /dev/null 2>&1 \
    || { echo "PostgreSQL could not be installed with apt-get." >&2; exit 1; }
