"""The report of `compare`: two traces or more, paired on what they share."""
