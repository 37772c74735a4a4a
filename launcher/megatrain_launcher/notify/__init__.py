"""Notifications of a job's incidents: what to send, what each receiver already got, and how each is reached.

The host of the elected driver sends them, in separate threads. See docs/adr/0047-notifications.md and
docs/guides/notifications.md.
"""
