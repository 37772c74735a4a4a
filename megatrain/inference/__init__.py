"""A whole model on one device, and text from it."""
