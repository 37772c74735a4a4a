"""What streamer and daemon say to each other: frames with a length, and a proof of the token."""
