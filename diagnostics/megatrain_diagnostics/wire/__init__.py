"""What streamer and daemon say to each other: Arrow Flight with a proof of the token."""
