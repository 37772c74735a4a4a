"""What workers and the launcher itself write: files that rotate, what is shown, what a failure's log says."""
