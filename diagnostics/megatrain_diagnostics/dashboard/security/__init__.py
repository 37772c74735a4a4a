"""Who asks, what they may, and how much: tokens, sessions, roles, headers, limits."""
