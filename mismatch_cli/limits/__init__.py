"""Is this normal? Compares a summary with the trainer's own noise first, then with what others
published.
"""
