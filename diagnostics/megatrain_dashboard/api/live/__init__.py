"""The stream that reports which responses are new."""
