"""Adapters for the systems that run hosts (a plain machine, Slurm, Kubernetes): they identify and cordon hosts."""
