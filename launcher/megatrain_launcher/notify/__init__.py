"""Telling people of a job's incidents: what there is to tell, who knows of it already, and how each receiver is told.

The host of the elected driver tells, in threads of its own. See docs/adr and docs/guides/notifications.md.
"""
