"""Summaries of many runs, read from their directories and etcds in bounded time."""
