"""Every link of the guide leads somewhere: to a file, and to a heading of it."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, MADE, PAGES, README, ROOT, anchors, text_of
from tests.looped import looped

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "lab" / "README.md", ROOT / "lab" / "LOG.md"]


@looped("page", [*PAGES, *MADE, *_OTHERS])
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)
    for target in _LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists() or file in MADE, f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), (
            f"{page.name} links to {target}; there are {sorted(anchors(file))}"
        )


def test_the_readme_leads_to_the_guide():
    assert "docs/README.md" in README.read_text(encoding="utf-8") or "](docs/" in README.read_text(
        encoding="utf-8"
    )
    assert (DOCS / "README.md").is_file()
