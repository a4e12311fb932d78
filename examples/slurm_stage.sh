#!/bin/bash
# Copy what each node will read to a disk of its own, then train there.
#
#   sbatch slurm_stage.sh DATA CACHE SCRIPT CHECKPOINT [MORE OPTIONS OF SCRIPT]
#   sbatch --export=ALL,THEN=1 --ntasks-per-node=1 slurm_stage.sh ...     # train in a job after it
#
# One job that does both is what SLURM can promise: all of its steps have the same nodes. The second
# line stages in a job that needs no accelerators, which submits the training to begin after it
# (afterok) on the same nodes, listed by name: SLURM then waits for these, however long, and keeps
# them free meanwhile only in a reservation. CACHE has to outlive the job for that: what
# job_container/tmpfs mounts, and what an epilog clears, does not. Where something was lost, or a
# node is another one, training copies what it needs itself.
#
# Ranks are numbered from node to node (the block distribution, SLURM's default), and SLURM sorts
# the names of a list of nodes, so that a node has the same number in both jobs.
#SBATCH --job-name=stage
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
data=${1:-/scratch/$USER/train-grouped}
cache=${2:-/local/$USER/cache}
script=${3:-train.py}
checkpoint=${4:-/scratch/$USER/checkpoint.pt}
per_node=4

# One process a node, which takes its number from SLURM. The options are those of SCRIPT's Reader.
# Where a node is lost, srun may end with 0: each says at its end what was needed.
if [[ -z ${STAGED:-} ]]; then
  staged=$(srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    dsprep stage "$data" --to "$cache" --ranks $((SLURM_NNODES * per_node)) \
    --ranks-per-node $per_node --batch-size 8 --seed 1 --remainder drop --epochs 2 |
    tee >(cat >&2) | grep -c '^needed ' || true)
  if ((staged != SLURM_NNODES)); then
    echo "$staged of $SLURM_NNODES nodes have staged: submit the job again, which continues" >&2
    exit 1
  fi
fi
# The other job has the limits of this one; sbatch would take those of the #SBATCH lines above.
if [[ -n ${THEN:-} ]]; then
  exec sbatch --dependency=afterok:"$SLURM_JOB_ID" --nodelist="$SLURM_JOB_NODELIST" \
    --nodes="$SLURM_NNODES" --ntasks-per-node=$per_node \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    ${SLURM_JOB_PARTITION:+--partition="$SLURM_JOB_PARTITION"} \
    ${SLURM_JOB_ACCOUNT:+--account="$SLURM_JOB_ACCOUNT"} ${SLURM_JOB_QOS:+--qos="$SLURM_JOB_QOS"} \
    --time="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%l)" \
    --export=ALL,THEN=,STAGED=1 "$0" "$data" "$cache" "${@:3}"
fi
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
srun --distribution=block --kill-on-bad-exit=1 python "$script" "$data" --cache "$cache" \
  --checkpoint "$checkpoint" "${@:5}"
