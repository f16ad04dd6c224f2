#!/bin/bash
# Slurm: srun starts one task for each GPU. The loader reads the ranks and nodes from Slurm's own variables.
#
#     sbatch train_slurm.sh TRAIN HELD_OUT
#
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --requeue

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun does not inherit
srun python examples/train_ddp.py "$@" # fit starts the process group
