"""What a failure was and whose: from log lines, exit codes and the ranks' last sequence numbers. Standard library only.

The one idea: tables of rules that know what NCCL, gloo, CUDA, torch, Linux, Slurm, Kubernetes and file systems print,
one small scorer in which a cause beats its consequences, and pure functions around them.
"""
