"""From one form of a checkpoint to another, offline: another layout, Hugging Face's files, and back. CPU only.

Streaming: memory holds one rank's plan and an item, or one parameter, at a time.
"""
