"""`python -m mismatch_cli`."""

from mismatch_cli.cli import main

if __name__ == "__main__":
    main()
