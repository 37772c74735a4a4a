"""Child processes that live and die with their parent, and are started again when they end."""
