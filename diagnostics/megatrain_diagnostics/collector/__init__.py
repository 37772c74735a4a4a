"""The daemon's receiver of event streams: checks batches, stores them, and acknowledges them when they are on disk."""
