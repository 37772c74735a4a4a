"""Limits on how long ranks may make no progress, and how long workers may run after their host's lease ended.

Pure functions: no I/O and no clock. The trainer, the launcher and the diagnosis apply the same rules.
"""
