# sh quietly.sh LOG COMMAND…: runs the command, whose output goes to LOG and is shown only if it fails.
log=$1
shift
"$@" >"$log" 2>&1 || { status=$?; cat "$log"; exit $status; }
