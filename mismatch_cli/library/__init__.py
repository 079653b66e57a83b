"""What `mismatch_cli.open` returns: everything that the commands show, as objects; both call the
same functions.
"""
