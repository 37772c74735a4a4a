"""Telemetry of a host's GPUs and links: the program that reads it, its supervisor, and the rows made of it."""
