"""The etcd v3 client: calls, leases, watches and elections over etcd's JSON gateway.

Standard library and h11 (ADR 0018). Every call has a deadline. After every error, the client tries another endpoint.
Only `close` ends a thread. etcd carries only small data: leases, commands, rounds; never timelines or logs.
"""
