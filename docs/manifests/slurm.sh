#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
# The same random number on all ranks, which nobody else knows: sbatch passes its environment on.
export JAXRING_SECRET=${JAXRING_SECRET:-$(openssl rand -hex 16)}
# The coordinator is the first node; another address: export JAXRING_COORDINATOR=host:port
srun python train.py
