"""A run under way, followed from outside: what has come to it, step by step, and what is on record of that."""
