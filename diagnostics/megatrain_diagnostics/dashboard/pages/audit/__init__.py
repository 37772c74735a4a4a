"""What was done after verdicts, and what people asked for through the page."""
