#!/usr/bin/env bash
#SBATCH --job-name=asyncrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#
# Store and learner on the first node of a job, generators on all others:
#     sbatch --nodes=4 deploy/slurm.sh task.yaml [key.path=value ...]
# Submit it where asyncrl is on PATH, from a directory that all nodes see: the run directory in it carries the run's secret. Five minutes
# before the time limit the learner saves and ends; a job that is submitted again resumes. One node needs none of this: `asyncrl up`.
set -euo pipefail

fail() { printf 'slurm: %s\n' "$*" >&2; exit 1; }

[ "$#" -ge 1 ] || fail "which config? sbatch deploy/slurm.sh task.yaml [key.path=value ...]"
config=$1
shift
mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?submit this with sbatch}")
[ "${#nodes[@]}" -ge 2 ] || fail "${#nodes[@]} node; two are needed, or run asyncrl up --config $config in the job"
others=$(IFS=,; echo "${nodes[*]:1}")

# The address of this node in the network of the others; ASYNCRL_ADDRESS where the first one is not it.
address=${ASYNCRL_ADDRESS:-$(hostname -I | awk '{print $1}')}
port=${STORE_PORT:-16379}
url=redis://$address:$port/0
ASYNCRL_STORE_PASSWORD=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export ASYNCRL_STORE_PASSWORD
data=$(mktemp -d) # what counts is in the checkpoints: the store may start empty
trap 'rm -rf "$data"' EXIT

# By standard input, because arguments are visible to everyone on the machine. maxmemory is 1.5 times store.max_gib.
"${STORE_SERVER:-$(python3 -c 'from asyncrl.buffer.server import find_server; print(find_server())')}" - <<END &
bind 127.0.0.1 $address
port $port
requirepass $ASYNCRL_STORE_PASSWORD
dir $data
appendonly no
save ""
maxmemory 6gb
maxmemory-policy noeviction
END
store=$!

srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    asyncrl learner --config "$config" "store.url=$url" "control.bind=tcp://$address:${CONTROL_PORT:-16380}" "$@" &
learner=$!
trap 'kill -TERM "$learner" 2>/dev/null || true' TERM

# Until the learner has taken hold of the store generators are refused; one that fails later is started again with its node's others.
serve() {
    while kill -0 "$learner" 2>/dev/null; do
        srun --nodes="$((${#nodes[@]} - 1))" --ntasks-per-node=1 --nodelist="$others" \
            asyncrl generator --count "${GENERATORS_PER_NODE:-8}" --store "$url" && return
        sleep "${RETRY_S:-15}"
    done
}
serve &
generators=$!

wait "$learner" || true # a signal ends it early
while kill -0 "$learner" 2>/dev/null; do wait "$learner" || true; done
status=0
wait "$learner" || status=$?
wait "$generators" || true # they leave with the run
kill "$store" 2>/dev/null || true
wait "$store" || true
exit "$status"
