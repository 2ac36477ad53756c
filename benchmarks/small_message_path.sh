#!/bin/bash
# Instructions of one 16-byte allreduce between two ranks, both ranks together, by callgrind: the difference of two
# runs, so that set-up does not count (the threads take turns there, so some of it is waiting).   benchmarks/small_message_path.sh BUILD_FOLDER [processes|devices]
set -eu
program=$1/small_message_path layout=${2:-processes}
count() { # instructions of a run of $1 operations
  valgrind --tool=callgrind --fair-sched=yes --callgrind-out-file=/dev/null "$program" "$layout" "$1" 2>&1 |
    sed -n 's/.*Collected : *\([0-9]*\).*/\1/p'
}
few=$(count 1000) many=$(count 11000)
echo "$layout: $(((many - few) / 10000)) instructions for an allreduce of 16 bytes between 2 ranks (both together)"
