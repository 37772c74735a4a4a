"""From findings to verdicts: what the driver gets, how often, and what is withheld."""
