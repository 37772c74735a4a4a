"""Telemetry of a host's GPUs and links: the program that reads the devices, its supervisor, and the table rows."""
