"""Notifications of a job's incidents: what to send, what each receiver knows already, and how each is reached.

The host of the elected driver tells, in threads of its own. See docs/adr and docs/guides/notifications.md.
"""
