"""Checkpoints of a job's state: taken into host memory, written as torch distributed checkpoints, loaded in any layout.

Nothing is imported here: some of the modules run in processes that have no torch.
"""
