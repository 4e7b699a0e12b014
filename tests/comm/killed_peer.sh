#!/usr/bin/env bash
# killed_peer.sh PROGRAM: several times over, rank 1 is killed and rank 0 must end by itself with a PeerError naming it.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for round in 1 2 3 4 5 6; do
  for rank in 1 0; do
    RANK=$rank WORLD_SIZE=2 LOCKSTEP_INIT_METHOD=file://$folder/store$round "$1" >"$folder/$rank.log" 2>&1 &
    eval "pid$rank=$!"
  done
  wait "$pid1"
  killed=$?
  wait "$pid0"
  survived=$?
  if [ $killed -ne 137 ] || [ $survived -ne 0 ] || ! grep -q 'PeerError: rank 0: all_reduce: .*rank 1 (pid .*) is gone: ' "$folder/0.log"; then
    echo "round $round: rank 1 ended with $killed, rank 0 with $survived:"
    cat "$folder/0.log"
    exit 1
  fi
done
head -n 1 "$folder/0.log"
