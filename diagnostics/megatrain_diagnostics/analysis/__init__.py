"""Analyses: pure functions from events to findings. No file, socket, clock or etcd."""
