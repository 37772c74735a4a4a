"""The etcd v3 client: calls, leases, watches and elections over etcd's JSON gateway.

Standard library and h11 (ADR 0018). Every call has a deadline. If a member fails or does not answer, the client tries
another one. The threads of leases and watches run until `close`; only a lost lease or a refused watch ends one earlier.
etcd carries only small data: leases, commands, rounds; never timelines or logs.
"""
