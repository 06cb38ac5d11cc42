#!/usr/bin/env bash
# Starts N processes with Open MPI or MPICH.
#
#   launch/mpirun.sh [--max_restarts=K] [--log_dir=DIR] [--dry_run] N [MPI OPTIONS] -- COMMAND...
#   launch/mpirun.sh 4 --hostfile hosts -- python -m experiments.run --layout="fsdp=4"
#
# Each process takes its number of processes and id from the environment of MPI. The
# coordinator, the process of rank 0, is on this host unless MESHPAR_COORDINATOR is set.
set -u
# shellcheck source=launch/supervise.sh
source "$(dirname "$0")/supervise.sh"

parse "$@"
if ! [[ "${words[0]:-}" =~ ^[1-9][0-9]*$ ]] || ((${#command[@]} < 1)); then
  usage
fi

mpi=("${words[@]:1}")
if mpirun --version 2>/dev/null | grep -q "Open MPI"; then
  mpi+=(--output-filename "$log_dir")
  for name in COORDINATOR PROGRESS TOKEN; do mpi+=(-x "MESHPAR_$name"); done
else
  mpi+=(-outfile-pattern "$log_dir/%r.log" -genvall)
fi
supervise --coordinator_host="$(hostname)" \
  -- mpirun -n "${words[0]}" "${mpi[@]}" "${command[@]}"
