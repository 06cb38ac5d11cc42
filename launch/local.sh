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
# shellcheck source=launch/supervise.sh
source "$(dirname "$0")/supervise.sh"

parse "$@"
if ((${#words[@]} != 1 || ${#command[@]} < 1)) || ! [[ "${words[0]}" =~ ^[1-9][0-9]*$ ]]; then
  usage
fi
supervise --processes="${words[0]}" -- "${command[@]}"
