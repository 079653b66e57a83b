"""The subcommands, one file each: the only package that knows a command line.

Heavy imports live inside functions.
"""
