"""verl: what it saves, what its dashboard shows and how to record from inside its training."""
