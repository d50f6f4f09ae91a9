#!/usr/bin/env bash
# Record how long a command takes, or show the records:
#     .ci/timed.sh FILE NAME COMMAND...
#     .ci/timed.sh FILE --show
set -uo pipefail
file=$1 name=$2
if [[ $name == --show ]]; then
    [[ ! -f $file ]] || { echo "Took: $(paste -sd, "$file" | sed 's/,/, /g')"; rm -f "$file"; }
    exit 0
fi
shift 2
begun=$SECONDS
"$@"
status=$?
# Replace the record of an earlier run.
[[ ! -f $file ]] || sed -i "/^$name [0-9]* s\$/d" "$file"
(( SECONDS - begun < 2 )) || echo "$name $((SECONDS - begun)) s" >> "$file"
exit $status
