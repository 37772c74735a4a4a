"""The audit: what the driver did after verdicts, and what people requested."""
