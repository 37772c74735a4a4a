"""The kind and the culprit of a failure, from log lines, exit codes and the ranks' last sequence numbers. Needs no
third-party package.

Tables of rules match the messages of NCCL, gloo, CUDA, torch, Linux, Slurm, Kubernetes and file systems. Each rule
gives its lines a weight, and the heaviest line decides: a cause outweighs its consequences. No function does I/O.
"""
