"""One process per host, without torch: from the ranks' black boxes and logs to the daemon's stream."""
