"""prime-rl: what it saves and what its dashboard shows."""
