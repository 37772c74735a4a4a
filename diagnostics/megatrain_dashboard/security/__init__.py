"""Authentication, authorization and limits: tokens, sessions, roles, headers."""
