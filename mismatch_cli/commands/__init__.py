"""The subcommands, one file each: the only rooms that know a command line. Heavy imports live inside functions."""
