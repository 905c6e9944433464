"""Slurm: each job is a batch job, which the commands of Slurm on this machine submit, show and cancel."""
