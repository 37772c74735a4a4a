"""One process a host, without torch: from the ranks' black boxes and logs to the daemon's stream."""
