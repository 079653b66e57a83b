"""Record responses from inside a training run: numpy and pyarrow are all that it needs."""

from mismatch_cli.record.recorder import Recorder

__all__ = ["Recorder"]
