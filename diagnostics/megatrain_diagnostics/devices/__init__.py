"""Telemetry of a host's GPUs and links: the program that reads it, its keeper, and rows of what it says."""
