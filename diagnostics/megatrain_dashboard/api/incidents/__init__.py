"""Incidents: causes, responses and lost time."""
