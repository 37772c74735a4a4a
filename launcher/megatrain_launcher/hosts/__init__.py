"""The systems that run hosts: this machine, Slurm or Kubernetes. Each identifies a host, and can cordon it."""
