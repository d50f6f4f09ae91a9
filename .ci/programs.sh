#!/usr/bin/env bash
# Install the programs that tests need besides Python, from Debian, unless they exist.
set -euo pipefail

# debian SUBJECT PACKAGE NAME: install a package for the tests of a subject.
debian() {
    if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
        echo "The tests of $1 need $3: install it (apt-get install $2) and run make test again." >&2
        exit 1
    fi
    echo "Installing $3"
    { apt-get install -y -qq "$2" || { apt-get update -qq && apt-get install -y -qq "$2"; }; } > /dev/null 2>&1 \
        || { echo "$3 could not be installed with apt-get." >&2; exit 1; }
}

command -v chromium google-chrome chrome > /dev/null || debian "trace pages" chromium Chromium
command -v initdb > /dev/null || compgen -G "/usr/lib/postgresql/*/bin/initdb" > /dev/null \
    || debian checkpoints postgresql PostgreSQL
PATH="$PATH:/usr/sbin" command -v nginx > /dev/null || debian "replicas behind a balancer" nginx nginx
command -v bwrap > /dev/null || debian "the sandbox" bubblewrap Bubblewrap
