"""The etcd v3 client: calls, leases, watches and elections over etcd's JSON gateway.

Standard library and h11 (ADR 0018). Every call has a deadline, every error moves on to another endpoint, every thread
ends with `close` and with nothing else. What goes through etcd is small: leases, commands, rounds; never timelines or
logs.
"""
