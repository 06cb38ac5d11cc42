#!/usr/bin/env bash
# Runs a command on all workers of a Cloud TPU slice; creates the slice if TYPE is given.
#
#   launch/tpu_pod.sh [--max_restarts=K] [--dry_run] NAME ZONE [TYPE] -- COMMAND...
#   launch/tpu_pod.sh pod us-east5-a v5litepod-64 -- python -m experiments.run ...
#
# With TYPE it requests a queued resource NAME and waits for it. It copies the current
# folder to every worker and runs README's install command there. --workdir has to be a
# folder that all workers share, such as a mounted bucket. jax finds the other workers by
# itself.
set -u
here=$(dirname "$0")
# shellcheck source=launch/restarts.sh
source "$here/restarts.sh"

parse "$@"
set -- "${words[@]}"
words=()
while (($#)) && [[ "$1" != -- ]]; do
  words+=("$1")
  shift
done
if ((${#words[@]} < 2 || ${#words[@]} > 3 || $# < 2)); then
  sed -n 's/^#   //p' "$0" | head -1 >&2
  exit 2
fi
shift
name=${words[0]} zone=${words[1]} kind=${words[2]:-}
printf -v command '%q ' "$@"
version=${TPU_VERSION:-tpu-ubuntu2204-base}

tpus() {
  print_or_run gcloud compute tpus "$@" --zone="$zone"
}

prepare() {
  if [[ -n "$kind" ]]; then
    tpus queued-resources create "$name" --node-id="$name" --accelerator-type="$kind" \
      --runtime-version="$version" || return
    until $dry_run || [[ $(gcloud compute tpus queued-resources describe "$name" \
      --zone="$zone" --format='value(state.state)') == ACTIVE ]]; do
      sleep 30
    done
  fi
  tpus tpu-vm scp --recurse --worker=all . "$name:meshpar" || return
  tpus tpu-vm ssh "$name" --worker=all --command="cd meshpar && python3 -m venv .venv \
&& .venv/bin/pip install -q -e '.[experiments]' 'jax[tpu]'"
}

# Tells the processes of the workers to save and end; the next start resumes the run.
stop() {
  tpus tpu-vm ssh "$name" --worker=all --command="pkill -TERM -f experiments" || true
}
on_signals stop

start() {
  tpus tpu-vm ssh "$name" --worker=all \
    --command="cd meshpar && PATH=\$PWD/.venv/bin:\$PATH $command" \
    > >(tee -a "$log_dir/all.log") 2>&1 &
  wait_for $!
}

prepare || exit
with_restarts start
