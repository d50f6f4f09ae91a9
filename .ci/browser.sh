#!/usr/bin/env bash
# A headless browser for the tests of pages: the one that is there, else Debian's Chromium.
set -euo pipefail
for program in chromium google-chrome chrome; do
    if command -v "$program" > /dev/null; then exit 0; fi
done
if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
    echo "The tests of pages need Chromium: install it (apt-get install chromium) and run make test again." >&2
    exit 1
fi
echo "Installing Chromium"
{ apt-get install -y -qq chromium || { apt-get update -qq && apt-get install -y -qq chromium; }; } > /dev/null 2>&1 \
    || { echo "Chromium could not be installed with apt-get." >&2; exit 1; }
