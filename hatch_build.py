"""What a package index shows: the links of the project, and README.md with links and pictures that
lead into the repository, at the tag of this version.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\((?!https?://|#)([^)\s]+)\)")


def links(repository: str) -> dict[str, str]:
    """The links beside the description, of the project at this address."""
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/main/docs/README.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Source": repository,
    }


def with_whole_links(text: str, source: str, version: str) -> str:
    """The text with relative links made absolute; `source` is the URL of the repository."""
    raw = source.replace("//github.com/", "//raw.githubusercontent.com/")

    def whole(link: re.Match[str]) -> str:
        mark, shown, target = link.groups()
        place = f"{raw}/v{version}" if mark else f"{source}/blob/v{version}"
        return f"{mark}[{_LINK.sub(whole, shown)}]({place}/{target})"

    return _LINK.sub(whole, text)


class Metadata(MetadataHookInterface):
    """Fills in `urls` and `readme`, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        code = (root / "mismatch_cli" / "__init__.py").read_text(encoding="utf-8")
        version = re.search(r'^__version__ = "(.+)"$', code, re.MULTILINE)[1]  # type: ignore[index]
        text = (root / "README.md").read_text(encoding="utf-8")
        repository = self.config["repository"]
        metadata["urls"] = links(repository)
        whole = with_whole_links(text, repository, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": whole}
