"""What a killed process leaves beside the file or folder that it was writing."""

from pathlib import Path

from mismatch_cli.trace.drafts import MARK


def leave_draft(folder: Path, name: str) -> Path:
    """A draft of `name` in a folder, with half a file in it."""
    draft = folder / f".{name}.0123abcd.mismatch-cli.part"
    draft.mkdir(parents=True)
    (draft / MARK).touch()
    (draft / "new").write_bytes(b"half")
    return draft
