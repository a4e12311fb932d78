#!/bin/bash
# Measure ways of reading with all ranks of a job, which meet after every step of 12 ms.
#
#   sbatch slurm_bench.sh DATA SCRATCH
#SBATCH --job-name=dsprep-bench
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --no-requeue
set -euo pipefail
data=${1:-/scratch/$USER/train-grouped}
scratch=${2:-/scratch/$USER/bench}

srun --kill-on-bad-exit=1 dsprep bench read "$data" \
  --strategy h5py --strategy group-db --strategy dsprep \
  --compute 12ms --batch-size 4 --limit 64GiB --scratch "$scratch" \
  --json bench.json --html bench.html
