"""The protocol between streamer and daemon: length-prefixed frames, and authentication by a shared token."""
