"""verl: what it saves, what its dashboard shows and how to record from inside its training."""

from mismatch_cli.base.lazy import lazy

__getattr__ = lazy(__name__, {"Recorded": "recorder"})
