#!/usr/bin/env bash
#SBATCH --job-name=asyncrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#
# Learner and store on the first node of a job, generators on all others:
#     sbatch --nodes=4 deploy/slurm.sh task.yaml [key.path=value ...]
# Submit it where asyncrl is on PATH, from a directory that all nodes see. Five minutes before the time limit Slurm sends the learner a
# TERM (not `B:`: that would reach this script alone), and it finishes its step, saves and ends: take twice the time of a step and a
# checkpoint. A job that is submitted again resumes. `scancel --signal=TERM JOB` does the same earlier. One node needs none of this: `asyncrl up`.
set -euo pipefail

fail() { printf 'slurm: %s\n' "$*" >&2; exit 1; }

[ "$#" -ge 1 ] || fail "which config? sbatch deploy/slurm.sh task.yaml [key.path=value ...]"
config=$1
shift
mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?submit this with sbatch}")
[ "${#nodes[@]}" -ge 2 ] || fail "${#nodes[@]} node; two are needed, or run asyncrl up --config $config in the job"
generator_nodes=$((${#nodes[@]} - 1))
others=$(IFS=,; echo "${nodes[*]:1}")

# The address of this node in the network of the others; ASYNCRL_ADDRESS where the first one is not it.
address=${ASYNCRL_ADDRESS:-$(hostname -I | awk '{print $1}')}
store=$address:${STORE_PORT:-16379}

# What generators get of the run's secrets: join.key, in a directory that all nodes see and only this user reads.
keys=$(umask 077; mktemp -d "$PWD/.asyncrl-job-XXXXXXXX")
trap 'rm -rf "$keys"' EXIT
trap : TERM # the steps get it too, and the learner decides

srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    asyncrl learner --config "$config" --join-key "$keys/join.key" \
    "store.bind=tcp://$store" "control.bind=tcp://$address:${CONTROL_PORT:-16380}" "$@" &
learner=$!

# Generators that fail are started again with their node's others. SLURM_NTASKS of the job would start a second task on a node.
serve() {
    while kill -0 "$learner" 2>/dev/null; do
        ASYNCRL_SECRET_FILE=$keys/join.key srun --nodes="$generator_nodes" --ntasks="$generator_nodes" --ntasks-per-node=1 \
            --nodelist="$others" asyncrl generator --count "${GENERATORS_PER_NODE:-8}" --store "redis://generator@$store/0" \
            --wait "${WAIT_S:-900}" && return
        sleep "${RETRY_S:-15}"
    done
}
serve &
generators=$!

wait "$learner" || true # a signal ends it early
while kill -0 "$learner" 2>/dev/null; do wait "$learner" || true; done
status=0
wait "$learner" || status=$?
for _ in {1..60}; do # they leave with the run; the end of this script ends those that do not
    kill -0 "$generators" 2>/dev/null || break
    sleep 1
done
exit "$status"
