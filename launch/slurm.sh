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
# SLURM runs a copy of this script; supervise.sh is in the folder of the submission.
# shellcheck source=launch/supervise.sh
source "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}/launch/supervise.sh"

parse "$@"
if ((${#words[@]} || ${#command[@]} < 1)); then
  usage
fi
job=${SLURM_JOB_ID:-JOB}
# A signal goes to the tasks alone: srun would kill them on a signal of its own. When one
# task ends, the others have a minute to save before they are stopped.
supervise --on_signal="scancel --signal=TERM $job" \
  --on_stopped="scontrol requeue $job" \
  -- srun --wait=60 --kill-on-bad-exit=0 --export=ALL --output="$log_dir/%t.log" \
  --open-mode=append "${command[@]}"
