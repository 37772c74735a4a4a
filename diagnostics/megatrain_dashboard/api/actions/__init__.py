"""Actions that an operator requests."""
