"""What `mismatch_cli.open` gives: everything that the commands show, as objects; both call the same functions."""
