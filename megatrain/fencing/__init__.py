"""How long ranks may make no progress, and workers may outlive their host's lease. Pure.

The trainer, the launcher and the diagnosis apply the same rules.
"""
