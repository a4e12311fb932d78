#!/bin/bash
# Repack a dataset on four nodes: the first process plans and publishes, the others write shards.
#SBATCH --job-name=dsprep-repack
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=2
#SBATCH --time=01:00:00
# A job that ran out of time is submitted again as it is: what is complete stays.
set -euo pipefail
data=${1:-/scratch/$USER/train}
out=${2:-/scratch/$USER/train-grouped}

srun dsprep repack "$data" "$out" --to hdf5 --buffer-size 64MiB --shard-size 4GiB --shuffle 1 \
  --memory 2GiB --no-measure
srun dsprep verify "$out" "$out" --sample 0.001 # or against the source, if it was not shuffled
