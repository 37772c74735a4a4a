"""The kind and the culprit of a failure, from log lines, exit codes and the ranks' last sequence numbers. Standard
library only.

The one idea: tables of rules for the messages of NCCL, gloo, CUDA, torch, Linux, Slurm, Kubernetes and file systems,
one small scorer in which a cause beats its consequences, and pure functions around them.
"""
