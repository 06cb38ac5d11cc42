#!/usr/bin/env bash
#SBATCH --job-name=meshpar
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
# One task per host, or per GPU with --ntasks-per-node=8 --gpus-per-task=1.
#
#   sbatch --nodes=4 launch/slurm.sh [--max_restarts=K] [--log_dir=DIR] -- COMMAND...
#   launch/slurm.sh --dry_run -- python -m experiments.run --layout="data=4,fsdp=8"
#
# jax finds coordinator and processes in SLURM's environment. Every task has a log in
# DIR, which all hosts should share. SLURM sends SIGTERM three minutes before the time
# limit: the run saves, and the job is queued again.
set -u
# SLURM runs a copy of this script; restarts.sh is in the folder of the submission.
# shellcheck source=launch/restarts.sh
source "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}/launch/restarts.sh"

parse "$@"
set -- "${words[@]}"
if [[ "${1:-}" != -- || $# -lt 2 ]]; then
  sed -n 's/^#   //p' "${BASH_SOURCE[0]}" | head -1 >&2
  exit 2
fi
shift
command=("$@")

started=false
# Signals the tasks only: srun would kill them on a signal of its own.
forward() {
  $started && scancel --signal=TERM "$SLURM_JOB_ID"
}
on_signals forward

start() {
  local code
  if $dry_run; then
    print_or_run srun --wait=60 --output="$log_dir/%t.log" "${command[@]}"
    return
  fi
  # When one task ends, the others have a minute to save before they are stopped.
  srun --kill-on-bad-exit=0 --wait=60 --output="$log_dir/%t.log" --open-mode=append \
    "${command[@]}" &
  started=true
  wait_for $!
  code=$?
  if [[ "$stop_signal" == TERM && -n "${SLURM_JOB_ID:-}" ]] && ((code == 75)); then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$code"
}

with_restarts start
