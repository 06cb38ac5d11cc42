#!/usr/bin/env bash
# Starts N processes with Open MPI or MPICH.
#
#   launch/mpirun.sh [--max_restarts=K] [--log_dir=DIR] [--dry_run] N [MPI OPTIONS] -- COMMAND...
#   launch/mpirun.sh 4 --hostfile hosts -- python -m experiments.run --layout="fsdp=4"
#
# Each process takes its number of processes, id and coordinator from the environment of
# MPI. MPICH sets no coordinator: MESHPAR_COORDINATOR is this host unless it is set.
set -u
# shellcheck source=launch/restarts.sh
source "$(dirname "$0")/restarts.sh"

parse "$@"
set -- "${words[@]}"
num=${1:-}
options=()
shift || true
while (($#)) && [[ "$1" != -- ]]; do
  options+=("$1")
  shift
done
if ! [[ "$num" =~ ^[1-9][0-9]*$ && $# -ge 2 ]]; then
  sed -n 's/^#   //p' "$0" | head -1 >&2
  exit 2
fi
shift
command=("$@")

if mpirun --version 2>/dev/null | grep -q "Open MPI"; then
  options+=(--output-filename "$log_dir" -x MESHPAR_COORDINATOR -x MESHPAR_PROGRESS \
    -x MESHPAR_TOKEN)
else
  options+=(-outfile-pattern "$log_dir/%r.log" -genvall)
fi
export MESHPAR_COORDINATOR="${MESHPAR_COORDINATOR:-$(hostname):12321}"

mpi_pid=""
forward() {
  [[ -n "$mpi_pid" ]] && kill -s "$1" "$mpi_pid" 2>/dev/null
}
on_signals forward

start() {
  if $dry_run; then
    print_or_run mpirun -n "$num" "${options[@]}" "${command[@]}"
    return
  fi
  mpirun -n "$num" "${options[@]}" "${command[@]}" &
  mpi_pid=$!
  wait_for "$mpi_pid"
}

with_restarts start
