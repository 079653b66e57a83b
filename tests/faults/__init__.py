"""Planted faults: whether the suite would notice if a line of the package were wrong.

    python -m tests.faults record               which lines each test of the push tier runs, once
    python -m tests.faults plant --seed 1       200 random faults, each against the tests that run
                                                its line; prints the survivors
    python -m tests.faults plant --only NAME    one fault again
    python -m tests.faults show NAME            what it changes

The seeds 45, 46 and 47 are those whose survivors are looked at: at least 90 % of 200 must be
noticed for each.

`operators` says which faults there are, `reach` which tests can notice one, `trials` runs them.
Those that change nothing a user could see are listed in `equivalent.toml`, below the reason.
"""
