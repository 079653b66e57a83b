"""open-instruct: what it saves and what its dashboard shows."""
