#!/usr/bin/env bash
# Starts N processes on this machine that form one mesh (jax.distributed).
#
#   launch/local.sh [--log_dir=DIR] N -- COMMAND...
#   launch/local.sh 2 -- python -m experiments.run --layout="data=2,fsdp=2,tensor=2"
#
# Process 0 prints here; the log of every process lies in DIR (logs/ by default). When
# one fails, the others are stopped and its exit code is returned. SIGTERM and Ctrl-C
# go to all of them.
set -u

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 501)); then
  echo "launch/local.sh needs bash 5.1 or newer, this is $BASH_VERSION" >&2
  exit 2
fi

usage() {
  echo "usage: launch/local.sh [--log_dir=DIR] N -- COMMAND..." >&2
  exit 2
}

log_dir=logs
while [[ "${1:-}" == --log_dir=* ]]; do
  log_dir=${1#--log_dir=}
  shift
done
[[ $# -ge 3 && "$1" =~ ^[1-9][0-9]*$ && "$2" == -- ]] || usage
num=$1
shift 2
mkdir -p "$log_dir" || exit 2

port=$(python3 -c 'import socket
with socket.socket() as s:
    s.bind(("localhost", 0))
    print(s.getsockname()[1])') || exit 2
export MESHPAR_COORDINATOR="localhost:$port" MESHPAR_NUM_PROCESSES="$num"

pids=()
stop_all() {
  local pid
  for pid in "${pids[@]}"; do kill -s "$1" "$pid" 2>/dev/null; done
}
# A signal to this script is for the run: pass it on and keep waiting for its end.
trap 'stop_all TERM' TERM
trap 'stop_all INT' INT

for ((i = 0; i < num; i++)); do
  if ((i == 0)); then
    MESHPAR_PROCESS_ID=$i "$@" > >(tee "$log_dir/$i.log") 2>&1 &
  else
    MESHPAR_PROCESS_ID=$i "$@" >"$log_dir/$i.log" 2>&1 &
  fi
  pids+=($!)
done

code=0
left=("${pids[@]}")
while ((${#left[@]})); do
  wait -n -p ended "${left[@]}"
  status=$?
  # A trapped signal ends `wait` without an ended process: look again.
  [[ -n "${ended:-}" ]] || continue
  for i in "${!left[@]}"; do
    [[ "${left[i]}" == "$ended" ]] && unset 'left[i]'
  done
  if ((status != 0 && code == 0)); then
    code=$status
    for i in "${!pids[@]}"; do
      [[ "${pids[i]}" == "$ended" ]] && failed=$i
    done
    if ((code != 75)); then
      echo "process $failed ended with code $code, see $log_dir/$failed.log;" \
        "stopping the others" >&2
      stop_all TERM
      (sleep 10 && stop_all KILL) >/dev/null 2>&1 &
      killer=$!
    fi
  fi
done
[[ -n "${killer:-}" ]] && kill "$killer" 2>/dev/null
exit "$code"
