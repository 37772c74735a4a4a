"""Which answers are new."""
