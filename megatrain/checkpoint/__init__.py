"""Checkpoints of a job's state: snapshots in host memory, torch distributed checkpoints in storage, loading into any
layout.

This file imports nothing, because some of the modules run in processes that have no torch.
"""
