"""What runs the hosts: this machine, Slurm or Kubernetes. Each tells a host who it is, and can take it out of use."""
