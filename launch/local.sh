#!/usr/bin/env bash
# Starts N processes on this machine that form one mesh (jax.distributed).
#
#   launch/local.sh [--log_dir=DIR] [--max_restarts=K] [--dry_run] N -- COMMAND...
#   launch/local.sh 2 -- python -m experiments.run --layout="data=2,fsdp=2,tensor=2"
#
# Process 0 prints to this terminal; every process has a log in DIR (logs/ by default).
# When a process fails, the others are stopped. The run then starts again from its last
# checkpoint, or returns the exit code if no restart is left. SIGTERM and Ctrl-C are
# forwarded to all processes.
set -u

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 501)); then
  echo "launch/local.sh needs bash 5.1 or newer, this is $BASH_VERSION" >&2
  exit 2
fi
# shellcheck source=launch/restarts.sh
source "$(dirname "$0")/restarts.sh"

parse "$@"
set -- "${words[@]}"
if ! [[ $# -ge 3 && "$1" =~ ^[1-9][0-9]*$ && "$2" == -- ]]; then
  sed -n 's/^#   //p' "$0" | head -1 >&2
  exit 2
fi
num=$1
shift 2

if $dry_run; then
  echo "$num processes on this machine, each with MESHPAR_COORDINATOR=localhost:PORT" \
    "MESHPAR_NUM_PROCESSES=$num MESHPAR_PROCESS_ID=0..$((num - 1)), logs in $log_dir," \
    "at most $max_restarts restarts:"
  print_or_run "$@"
  exit 0
fi

pids=()
stop_all() {
  local pid
  for pid in "${pids[@]}"; do kill -s "$1" "$pid" 2>/dev/null; done
}
on_signals stop_all

command=("$@")

start() {
  local port i status failed code=0 left killer=""
  port=$(python3 -c 'import socket
with socket.socket() as s:
    s.bind(("localhost", 0))
    print(s.getsockname()[1])') || return 2
  export MESHPAR_COORDINATOR="localhost:$port" MESHPAR_NUM_PROCESSES="$num"
  pids=()
  for ((i = 0; i < num; i++)); do
    if ((i == 0)); then
      MESHPAR_PROCESS_ID=$i "${command[@]}" > >(tee -a "$log_dir/$i.log") 2>&1 &
    else
      MESHPAR_PROCESS_ID=$i "${command[@]}" >>"$log_dir/$i.log" 2>&1 &
    fi
    pids+=($!)
  done
  [[ -n "$stop_signal" ]] && stop_all TERM
  left=("${pids[@]}")
  while ((${#left[@]})); do
    ended=""
    wait -n -p ended "${left[@]}"
    status=$?
    # A trapped signal ends `wait` although no process has ended: wait again.
    [[ -n "${ended:-}" ]] || continue
    for i in "${!left[@]}"; do
      [[ "${left[i]}" == "$ended" ]] && unset 'left[i]'
    done
    if ((status != 0 && (code == 0 || code == 75))); then
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
  [[ -n "$killer" ]] && kill "$killer" 2>/dev/null
  return "$code"
}

mkdir -p "$log_dir" || exit 2
for ((i = 0; i < num; i++)); do : >"$log_dir/$i.log"; done
with_restarts start
