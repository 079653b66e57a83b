"""ms-swift: what its dashboard shows."""
