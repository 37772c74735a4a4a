"""The kind and the culprit of a failure, from log lines, exit codes and the ranks' last sequence numbers. Standard
library only.

Tables of rules match the messages of NCCL, gloo, CUDA, torch, Linux, Slurm, Kubernetes and file systems. A small scorer
decides, in which a cause outweighs its consequences. The functions around it are pure.
"""
