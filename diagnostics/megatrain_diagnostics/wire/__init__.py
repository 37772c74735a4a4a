"""The protocol of streamer and daemon: frames with a length, and a proof of the token."""
