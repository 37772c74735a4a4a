"""Logging in."""
