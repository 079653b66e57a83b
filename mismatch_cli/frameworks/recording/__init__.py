"""Record responses from inside a training run; needs only numpy and pyarrow."""

from mismatch_cli.frameworks.recording.recorder import Recorder

__all__ = ["Recorder"]
