"""Authenticated connections between programs of a job, over plain TCP: links, and the server that accepts them.

Loads no torch.
"""
