"""From the command line to a running executor: flags, the plan that follows from them, and its processes."""
