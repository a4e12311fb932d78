#!/bin/bash
# Repack a dataset on four nodes: the first process plans and publishes, the others write shards.
#
#   sbatch slurm_repack.sh DATA OUT [MORE OPTIONS OF dsprep repack]
#
# A job that ran out of time is submitted again as it is, and one that lost a node is started again
# by SLURM: what is complete stays.
#SBATCH --job-name=dsprep-repack
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=2
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
data=${1:-/scratch/$USER/train}
out=${2:-/scratch/$USER/train-grouped}

srun --kill-on-bad-exit=1 dsprep repack "$data" "$out" --to hdf5 --buffer-size 64MiB \
  --shard-size 4GiB --shuffle 1 --memory 2GiB "${@:3}"
srun --kill-on-bad-exit=1 dsprep verify "$data" "$out" --sample 0.001 # in the order of the shuffle
