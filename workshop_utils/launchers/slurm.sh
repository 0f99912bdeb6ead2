#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --cpus-per-task={cpus}
{memory}#SBATCH --time={minutes}
#SBATCH --distribution=block
#SBATCH --chdir={folder}/files/source
#SBATCH --output={folder}/log
#SBATCH --open-mode=append
#SBATCH --export=NONE
{options}

echo "job $SLURM_JOB_ID starts on $SLURM_JOB_NODELIST"  # once more for a job that is requeued
set -e
{setup}
export PATH={path}:$PATH
export SLURM_EXPORT_ENV=ALL  # --export=NONE is for this script, not for its srun
source ../secrets
trap 'jobs -p | xargs -r kill' EXIT
node=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
first=$((12000 + SLURM_JOB_ID % 312 * 64))
port=($(seq $first $((first + 63))))  # this job's own, all below those that the kernel gives away, from 32768 on
{exports}
{data}{processes}
