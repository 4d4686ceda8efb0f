#!/bin/bash
# sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=32 docs/launching/slurm.sh --config=... --workdir=...
#SBATCH --job-name=digen_jax
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
# Five minutes before the end every process gets SIGTERM: the run finishes its step and saves.
#SBATCH --signal=TERM@300

# Since Slurm 22.05 srun does not take --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# If one process fails, Slurm does not end the others; they end by themselves with code 75.
exec srun --kill-on-bad-exit=0 --wait=0 python launch/train.py "$@" --coordinator=auto
