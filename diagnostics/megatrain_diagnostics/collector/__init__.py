"""The daemon's ear: streams in, acknowledged when they are on disk."""
