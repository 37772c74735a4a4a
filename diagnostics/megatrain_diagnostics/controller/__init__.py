"""From findings to verdicts: which the driver gets, how often, and which are withheld."""
