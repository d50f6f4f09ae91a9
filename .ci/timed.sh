#!/usr/bin/env bash
# Notes how long a command takes, and shows what was noted:
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
# In place of what an interrupted run left.
[[ ! -f $file ]] || sed -i "/^$name [0-9]* s\$/d" "$file"
(( SECONDS - begun < 2 )) || echo "$name $((SECONDS - begun)) s" >> "$file"
exit $status
