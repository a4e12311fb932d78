#!/bin/bash
# Measure ways of reading with all ranks of a job, which meet after every step of 12 ms.
#SBATCH --job-name=dsprep-bench
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
set -euo pipefail
data=${1:-/scratch/$USER/train-grouped}

srun dsprep bench read "$data" --strategy h5py --strategy group-db --strategy dsprep \
  --compute 12ms --batch-size 4 --limit 64GiB --scratch "/scratch/$USER/bench" \
  --json bench.json --html bench.html
