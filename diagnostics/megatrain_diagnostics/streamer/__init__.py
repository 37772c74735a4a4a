"""The streamer, a process per host without torch: sends the ranks' black boxes and logs to the daemon."""
