#!/usr/bin/env bash
# Options of all launchers, and the supervisor that starts and restarts their commands.
#
#   source supervise.sh; parse "$@"; supervise [OPTIONS] -- COMMAND...
#
# `python -m experiments.supervise` says what the supervisor does and lists its options.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dry_run=false
# shellcheck disable=SC2034 # The launchers use it.
log_dir=logs

# Splits the words of a launcher: options of the supervisor, up to the first other word,
# words of the launcher, up to `--`, and the command.
# shellcheck disable=SC2034 # The launchers use `command` and `log_dir`.
parse() {
  options=() words=() command=()
  while [[ "${1:-}" == --?* ]]; do
    case "$1" in
      --log_dir=*) log_dir=${1#*=} ;;
      --dry_run) dry_run=true ;;
    esac
    options+=("$1")
    shift
  done
  while (($#)) && [[ "$1" != -- ]]; do
    words+=("$1")
    shift
  done
  command=("${@:2}")
}

# Prints how to use the launcher, from its first lines, and ends it.
usage() {
  sed -n 's/^#   //p' "$0" | head -1 >&2
  exit 2
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

# Becomes the supervisor of a command; works from any folder.
supervise() {
  exec "${PYTHON:-python3}" -c 'import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("experiments.supervise", run_name="__main__", alter_sys=True)' \
    "$root" "${options[@]}" "$@"
}
