"""Child processes that live and die with their parent, started again when they end; signals that ask for a stop."""
