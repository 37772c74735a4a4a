"""Incidents: what went wrong, what was done about it, and what it cost."""
