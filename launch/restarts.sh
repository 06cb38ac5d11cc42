#!/usr/bin/env bash
# Options, signals and restarts of all launchers.
#
#   source restarts.sh; parse "$@"; with_restarts START
#
# START starts the run once and returns its exit code. Codes 0 and 2 (an error of the
# user) are final. Any other code starts the run again from its last checkpoint, up to
# --max_restarts times, unless the same step failed twice or a signal asked to stop.

max_restarts=0
dry_run=false
log_dir=logs
stop_signal=""

# Reads the options up to the first other word; stores the rest in `words`.
parse() {
  while [[ "${1:-}" == --* && "$1" != -- ]]; do
    case "$1" in
      --max_restarts=*) max_restarts=${1#*=} ;;
      --log_dir=*) log_dir=${1#*=} ;;
      --dry_run) dry_run=true ;;
      *) break ;;
    esac
    shift
  done
  if [[ ! "$max_restarts" =~ ^[0-9]+$ ]]; then
    echo "--max_restarts=$max_restarts: use a whole number" >&2
    exit 2
  fi
  # shellcheck disable=SC2034 # The launchers use it.
  words=("$@")
}

# Prints a command, quoted for the shell, under --dry_run; otherwise runs it.
print_or_run() {
  if $dry_run; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

# Forwards SIGTERM and Ctrl-C to the run with FORWARD SIGNAL; the run is not restarted
# after that. The first Ctrl-C is forwarded as SIGTERM, since bash makes background
# processes ignore SIGINT until they set a handler.
on_signals() {
  local forward=$1
  # shellcheck disable=SC2064 # The name is known now.
  trap "stop_signal=TERM; $forward TERM" TERM
  # shellcheck disable=SC2064
  trap "[[ -z \$stop_signal ]] && $forward TERM || $forward INT; stop_signal=INT" INT
}

# Waits until a child ends and returns its exit code. A trapped signal ends `wait` while
# the child still runs, so it waits again.
wait_for() {
  wait "$1"
  while kill -0 "$1" 2>/dev/null; do wait "$1"; done
  wait "$1"
}

# Prints the last step that process 0 finished, if the run has written one.
step_reached() {
  [[ -r "${MESHPAR_PROGRESS:-}" ]] && cat "$MESHPAR_PROGRESS"
}

# Starts the run with START until its exit code is final, and exits with that code.
with_restarts() {
  local start=$1 restarts=0 code=0 step failed_before=none
  $dry_run || mkdir -p "$log_dir" || exit 2
  MESHPAR_PROGRESS=$(realpath -m "$log_dir")/progress
  MESHPAR_TOKEN=${MESHPAR_TOKEN:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}
  export MESHPAR_PROGRESS MESHPAR_TOKEN
  while true; do
    $dry_run || rm -f "$MESHPAR_PROGRESS"
    "$start"
    code=$?
    ((code == 0 || code == 2)) && exit "$code"
    [[ -n "$stop_signal" ]] && exit "$code"
    step=$(step_reached)
    if ((code != 75)); then
      if [[ -n "$step" && "$step" == "$failed_before" ]]; then
        echo "ended with code $code twice after step $step: not started again" >&2
        exit "$code"
      fi
      failed_before=$step
    fi
    if ((restarts >= max_restarts)); then
      ((max_restarts)) && echo "ended with code $code after $restarts restarts" >&2
      exit "$code"
    fi
    restarts=$((restarts + 1))
    echo "ended with code $code after step ${step:-0}: restart $restarts of" \
      "$max_restarts, from the last checkpoint" >&2
  done
}
