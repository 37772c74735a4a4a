"""The diagnosis: what the ranks' spans, logs and stacks show of a job that is slow, hangs, or has bad numbers.

Streams go to the daemon, verdicts to etcd; training never waits for this package. See docs/adr/0021 to 0024.
"""
