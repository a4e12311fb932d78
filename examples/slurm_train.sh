#!/bin/bash
# Train on four nodes with four ranks each. dsprep.Reader takes rank and world size from srun.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
set -euo pipefail
data=${1:-/scratch/$USER/train-grouped}
script=${2:-train.py} # such as train_cosmoflow_torch.py of this folder

# Prove first, on one process, that every sample comes once however many ranks there are.
dsprep audit "$data" --ranks "$SLURM_NTASKS" --batch-size 4 --epochs 2
srun python "$script" "$data"
