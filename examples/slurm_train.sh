#!/bin/bash
# Train on four nodes with four ranks each. dsprep.Reader takes rank and world size from srun.
#
#   sbatch slurm_train.sh DATA SCRIPT CHECKPOINT [MORE OPTIONS OF SCRIPT]
#
# SCRIPT, such as train_cosmoflow_torch.py of this folder, continues from CHECKPOINT if that is
# there: when the job is submitted again, or started again by SLURM because it lost a node.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
data=${1:-/scratch/$USER/train-grouped}
script=${2:-train.py}
checkpoint=${3:-/scratch/$USER/checkpoint.pt}

# Prove first, on one process, that no sample comes twice however many ranks there are.
dsprep audit "$data" --ranks "$SLURM_NTASKS" --batch-size 4 --epochs 2
# Where torch.distributed meets; a port of this job's own.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
# --kill-on-bad-exit: when a rank is lost, the others do not wait for it.
srun --kill-on-bad-exit=1 python "$script" "$data" --checkpoint "$checkpoint" "${@:4}"
