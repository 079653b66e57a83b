"""miles: what it saves and what its dashboard shows."""
