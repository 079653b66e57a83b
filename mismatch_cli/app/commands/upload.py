"""`mismatch-cli upload`: copies a run folder to an object store, where every reading command
finds it.
"""

from dataclasses import dataclass
from pathlib import Path

from mismatch_cli.app.common import Common
from mismatch_cli.app.flags import flags
from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.options import part, setting

PANEL, PLACE = "Use elsewhere", 5


@dataclass(frozen=True, kw_only=True)
class UploadSettings:
    """What is copied, and where to."""

    run: Path | None = setting(None, "Run folder or trace folder.", argument=True, metavar="RUN")
    url: str | None = setting(
        None,
        "Destination: s3://, gs://, abfs:// or any other scheme of fsspec.",
        argument=True,
        metavar="URL",
    )


@flags()
def command(
    *,
    copied: UploadSettings = part(UploadSettings),
    common: Common = part(Common, "force", "quiet", "debug"),
) -> None:
    """Upload a run to an object store: shards first, manifests last.

    Examples:
      mismatch-cli upload probe-model s3://bucket/runs/probe-model
      mismatch-cli report s3://bucket/runs/probe-model --workers ray
    """
    from mismatch_cli.trace.stores import StorePath, located

    run, url = copied.run, copied.url
    if run is None or url is None:
        raise UsageError(
            f"Name a run and a destination, such as: {suggest('upload', 'RUN', 's3://BUCKET/RUN')}"
        )
    place = located(Path(url))
    if not isinstance(place, StorePath):
        raise UsageError(
            f"{url} is not on an object store. Name a URL: s3://BUCKET/RUN, gs://BUCKET/RUN or "
            "another."
        )
    from mismatch_cli.trace.upload import check_upload, upload

    files = check_upload(run, place, force=common.force)
    with common.progress.counting("Uploading", len(files), unit="files") as advance:
        upload(run, place, files, advance)
    common.progress.say(f"Wrote {place}. Read it with: {suggest('report', str(place))}")
