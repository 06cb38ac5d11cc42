#!/usr/bin/env bash
# Runs a command on all workers of a Cloud TPU slice; creates the slice if TYPE is given.
#
#   launch/tpu_pod.sh [--max_restarts=K] [--dry_run] NAME ZONE [TYPE] -- COMMAND...
#   launch/tpu_pod.sh pod us-east5-a v5litepod-64 -- python -m experiments.run ...
#
# With TYPE it requests a queued resource NAME and waits for it. It copies the current
# folder and a token to every worker and runs README's install command there. --workdir
# has to be a folder that all workers share, such as a mounted bucket. jax finds the
# other workers by itself.
set -u
# shellcheck source=launch/supervise.sh
source "$(dirname "$0")/supervise.sh"

parse "$@"
if ((${#words[@]} < 2 || ${#words[@]} > 3 || ${#command[@]} < 1)); then
  usage
fi
name=${words[0]} zone=${words[1]} kind=${words[2]:-}
version=${TPU_VERSION:-tpu-ubuntu2204-base}
ssh=(gcloud compute tpus tpu-vm ssh "$name" --worker=all --zone="$zone")

tpus() {
  print_or_run gcloud compute tpus "$@" --zone="$zone"
}

# A file keeps the token out of command lines, which every user of a machine can read.
copy_token() {
  local file code
  file=$(mktemp) || return
  head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$file"
  tpus tpu-vm scp --worker=all "$file" "$name:meshpar/.token"
  code=$?
  rm -f "$file"
  return "$code"
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
  copy_token || return
  tpus tpu-vm ssh "$name" --worker=all --command="cd meshpar && chmod 600 .token && \
python3 -m venv .venv && .venv/bin/pip install -q -e '.[experiments]' 'jax[tpu]'"
}

# Shell commands for a worker. Field 22 of a process's stat is the time when it started:
# an id alone may belong to another process by now.
started="cut -d' ' -f22 /proc/\$pid/stat"
send() {
  echo "read -r pid began <.process && [ \"\$($started)\" = \"\$began\" ] && kill -$1 \$pid"
}
record="pid=\$\$; echo \"\$pid \$($started)\" >.process"
printf -v quoted '%q ' "${command[@]}"
run="cd meshpar; { $(send KILL); } 2>/dev/null; $record; \
exec env PATH=\"\$PWD/.venv/bin:\$PATH\" MESHPAR_TOKEN_FILE=\"\$PWD/.token\" $quoted"

prepare || exit
printf -v stop '%q ' "${ssh[@]}" --command="cd meshpar && $(send TERM)"
supervise --on_signal="$stop" -- "${ssh[@]}" --command="$run"
