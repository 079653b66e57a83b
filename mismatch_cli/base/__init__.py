"""What everything else stands on, and that knows nothing of it: errors, text, numbers, settings."""
