"""The daemon's receiver of streams: it checks them, and acknowledges them when they are on disk."""
