"""From findings to verdicts: what is told to the driver, how often, and what is not."""
