#!/usr/bin/env bash
# Runs a command on a Ray cluster that is up (islands.host=ray).
#
#   launch/ray.sh [--address=HOST:PORT] [--dry_run] -- COMMAND...
#   launch/ray.sh -- python -m experiments.run --optimizer_mode=islands --set islands.host=ray
#
# Start Ray first, in this virtual environment and folder on every machine:
#   ray get-auth-token --generate   # once; copy ~/.ray/auth_token to all machines
#   RAY_AUTH_MODE=token RAY_worker_niceness=0 ray start --head --node-ip-address=ADDRESS
#   RAY_AUTH_MODE=token RAY_worker_niceness=0 ray start --address=ADDRESS:6379   # others
# Without --address the Ray of this machine is used.
set -u
# shellcheck source=launch/supervise.sh
source "$(dirname "$0")/supervise.sh"

address=auto
if [[ "${1:-}" == --address=?* ]]; then
  address=${1#*=}
  shift
fi
parse "$@"
for option in "${options[@]}"; do
  [[ "$option" == --dry_run ]] || usage
done
if ((${#words[@]} || ${#command[@]} < 1)); then
  usage
fi
print_or_run env RAY_ADDRESS="$address" RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" \
  PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "${command[@]}"
