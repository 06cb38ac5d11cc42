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
# jax finds coordinator and processes in SLURM's environment. The log of every task lies
# in DIR, which all hosts should share. Three minutes before the time limit SLURM sends
# SIGTERM: the run saves, and the job is queued again.
set -u
# SLURM copies the script elsewhere: the launchers lie where it was submitted.
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

step_pid=""
pass_on() {
  told=$1
  # srun itself would kill its tasks: this signals them alone.
  [[ -n "$step_pid" ]] && scancel --signal=TERM "$SLURM_JOB_ID"
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT

start() {
  local code
  if $dry_run; then
    say_or_run srun --wait=60 --output="$log_dir/%t.log" "${command[@]}"
    return
  fi
  # When one task ends the others have a minute to save; then they are stopped.
  srun --kill-on-bad-exit=0 --wait=60 --output="$log_dir/%t.log" --open-mode=append \
    "${command[@]}" &
  step_pid=$!
  wait "$step_pid"
  code=$?
  # A trapped signal ends `wait`: the tasks are still saving.
  while kill -0 "$step_pid" 2>/dev/null; do
    wait "$step_pid"
    code=$?
  done
  if [[ "$told" == TERM && -n "${SLURM_JOB_ID:-}" ]] && ((code == 75)); then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$code"
}

with_restarts start
