"""Finds out from the ranks' spans, logs and stacks why a job is slow, hangs, or computes bad numbers.

Hosts stream events to the daemon, which writes verdicts to etcd; training never waits. See docs/adr/0021 to 0024.
"""
