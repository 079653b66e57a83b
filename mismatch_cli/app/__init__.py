"""The command line: its commands, a file each, and what they share."""
