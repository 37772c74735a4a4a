"""The diagnosis: what the ranks' spans, logs and stacks say of a job that is slow, hangs, or computes nonsense.

Streams flow up, verdicts to etcd; training never waits for anything here. DESIGN decisions 13 to 16.
"""
