#!/usr/bin/env bash
# What all launchers share: options, signals, and when to start again.
#
#   source restarts.sh; parse "$@"; with_restarts START
#
# START starts the run once and returns its exit code. 0 and 2 (an error in what was
# asked) are final. Any other code starts the run again from its last checkpoint, up to
# --max_restarts times, unless the same step failed twice, or we were told to stop.

max_restarts=0
dry_run=false
log_dir=logs
told=""

# Reads the options up to the first other word; leaves the rest in `words`.
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
  # shellcheck disable=SC2034 # The launchers read it.
  words=("$@")
}

# Prints a command as one could type it; runs it unless --dry_run.
say_or_run() {
  if $dry_run; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

# SIGTERM and Ctrl-C are for the run: PASS_ON SIGNAL tells it, and it is not started
# again after its end. The first Ctrl-C arrives as SIGTERM: what bash starts in the
# background is deaf to SIGINT until it asks for it.
on_signals() {
  local pass_on=$1
  # shellcheck disable=SC2064 # The name is known now.
  trap "told=TERM; $pass_on TERM" TERM
  # shellcheck disable=SC2064
  trap "[[ -z \$told ]] && $pass_on TERM || $pass_on INT; told=INT" INT
}

# Waits for the end of a child and returns its exit code; a trapped signal alone ends
# `wait` too, but not the child.
wait_for() {
  wait "$1"
  while kill -0 "$1" 2>/dev/null; do wait "$1"; done
  wait "$1"
}

# The last step that process 0 finished, or nothing; the run writes it there.
step_reached() {
  [[ -r "${MESHPAR_PROGRESS:-}" ]] && cat "$MESHPAR_PROGRESS"
}

with_restarts() {
  local start=$1 restarts=0 code=0 step failed_before=none
  $dry_run || mkdir -p "$log_dir" || exit 2
  MESHPAR_PROGRESS=$(realpath -m "$log_dir")/progress
  export MESHPAR_PROGRESS
  while true; do
    $dry_run || rm -f "$MESHPAR_PROGRESS"
    "$start"
    code=$?
    ((code == 0 || code == 2)) && exit "$code"
    [[ -n "$told" ]] && exit "$code"
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
