"""The guide as a site, in site/: python -m tests.docs.site [serve]

Its pages are those of docs/, the options of each command, which are made here, and what they link
to beside it; README.md is the front page.
zensical.toml gives their order. A page that it does not name, a broken link or a warning ends the
build.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from tests.distribution import REPOSITORY
from tests.docs.pages import DOCS, MADE, ROOT, text_of

SITE, CONFIG = ROOT / "site", ROOT / "zensical.toml"
_ZENSICAL = (sys.executable, "-m", "zensical")
_BESIDE = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "lab/README.md": "project/benchmarks.md",
    "sample_data/README.md": "project/sample-data.md",
}
_MAKER = "mismatch_cli/app/guide_pages.py"  # of pages without a file
_FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_NESTED = re.compile(r"^( +)(?=[*-] )", re.M)
_LIST_BELOW = re.compile(r"^(?![*\-|#>\s]|\d+\.)(.+)\n(?=(?:[*-]|\d+\.) )", re.M)
_CODE = re.compile(r"(?<!`)(`+)(?!`)([^\n]*?)(?<!`)\1(?!`)")
_WORKERS = "assets/javascripts/workers"
_EVERY_WORD, _ANY_WORD = '(n,"and",', '(n,"or",'  # in the minified worker of the search
_IN_TERMINAL = """
!!! note "The same pages in your terminal"

    They come with every installation. `mismatch-cli guide` lists them, `mismatch-cli guide gate` shows [gate](gate.md),
    `mismatch-cli guide json/gate` its [JSON](json/gate.md): a page's address, without `.html`, is its name. Messages
    end with such a line where a page helps.
"""


def pages() -> dict[str, str]:
    """Where each page of the repository is on the site."""
    guide = [path.relative_to(ROOT).as_posix() for path in sorted([*DOCS.rglob("*.md"), *MADE])]
    return {
        page: page.removeprefix("docs/").replace("README.md", "index.md") for page in guide
    } | _BESIDE


def staged(page: str, places: dict[str, str]) -> str:
    """The text of a page as the site has it: links lead to pages of the site, else to the file
    in the repository.
    """
    text = text_of(ROOT / page)

    def led(link: re.Match[str]) -> str:
        name, mark, fragment = link[2].partition("#")
        if not name or name.startswith(("http:", "https:", "mailto:")):
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), name))
        if file in places:
            target = posixpath.relpath(places[file], posixpath.dirname(places[page]) or ".")
        elif file.startswith("docs/images/"):
            target = posixpath.relpath(
                file.removeprefix("docs/"), posixpath.dirname(places[page]) or "."
            )
        else:
            assert (ROOT / file).exists(), f"{page} links to {link[2]}"
            target = f"{REPOSITORY}/blob/main/{file}"
        return f"{link[1]}{target}{mark}{fragment}{link[3]}"

    parts = _FENCE.split(text)
    prose = [part if n % 2 else _for_markdown(_LINK.sub(led, part)) for n, part in enumerate(parts)]
    end = _IN_TERMINAL if page == "README.md" else ""
    source = _MAKER if ROOT / page in MADE else page
    return f"---\nsource: {source}\n---\n{''.join(prose)}{end}"


def _for_markdown(text: str) -> str:
    """What GitHub understands and Python-Markdown does not: lists below a line, or nested by 2;
    `a\\|b` in cells.
    """
    text = _NESTED.sub(lambda spaces: " " * max(4, len(spaces[1])), text)
    text = _LIST_BELOW.sub(r"\1\n\n", text)
    return _CODE.sub(_with_pipes, text)


def _with_pipes(code: re.Match[str]) -> str:
    """A piece of code in which `\\|` is a pipe."""
    if "\\|" not in code[2]:
        return code[0]
    return f"<code>{html.escape(code[2]).replace(chr(92) + '|', '&#124;')}</code>"


def named(nav: object) -> list[str]:
    """The pages that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    return [
        page for part in (nav.values() if isinstance(nav, dict) else nav) for page in named(part)
    ]


def put_together(folder: Path) -> Path:
    """Write what zensical reads into a folder: docs/ with all pages, and its configuration,
    which is returned.
    """
    places, config = pages(), CONFIG.read_text(encoding="utf-8")
    nav = named(tomllib.loads(config)["project"]["nav"])
    unnamed, absent = (
        sorted(set(places.values()) - set(nav)),
        sorted(set(nav) - set(places.values())),
    )
    assert not unnamed and not absent, f"nav of zensical.toml lacks {unnamed}, names {absent}"
    for named_here, replacement in {
        'custom_dir = "docs/theme"': f'custom_dir = "{DOCS / "theme"}"',
        "[project]\n": f'[project]\nrepo_url = "{REPOSITORY}"\n',
    }.items():
        assert config.count(named_here) == 1
        config = config.replace(named_here, replacement)
    written = {f"docs/{place}": staged(page, places).encode() for page, place in places.items()}
    written |= {
        f"docs/images/{path.name}": path.read_bytes() for path in (DOCS / "images").iterdir()
    }
    written[CONFIG.name] = config.encode()
    for name, content in written.items():
        path = folder / name
        # What serves looks at what is written
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return folder / CONFIG.name


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site in `folder`/site, whose search does not want every word on one page."""
    done = zensical("build", put_together(folder))
    for worker in (folder / "site" / _WORKERS).glob("search.*.js"):
        _ask_for_any_word(worker)
    return done


def _ask_for_any_word(worker: Path) -> None:
    """Join the words of a query with `or`: zensical has no setting for it, and ranks by how many
    match.
    """
    text = worker.read_text(encoding="utf-8")
    assert text.count(_EVERY_WORD) == 1, f"{worker.name} joins words differently: see site.py"
    worker.write_text(text.replace(_EVERY_WORD, _ANY_WORD), encoding="utf-8")


def zensical(command: str, config: Path) -> subprocess.CompletedProcess[str]:
    """What zensical says; the exit code is not 0 where anything was to be warned of."""
    quiet = os.environ | {"NO_COLOR": "1"}
    line = [*_ZENSICAL, command, "--strict", "--config-file", config]
    return subprocess.run(
        line, cwd=config.parent, env=quiet, capture_output=True, text=True, check=False
    )


def serve(folder: Path) -> None:
    """Serve the site at localhost:8000, and put it together again while pages are written."""
    with subprocess.Popen(
        [*_ZENSICAL, "serve", "--config-file", put_together(folder)], cwd=folder
    ) as server:
        try:
            while server.poll() is None:
                time.sleep(1)
                put_together(folder)
        except KeyboardInterrupt:
            server.terminate()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        if sys.argv[1:] == ["serve"]:
            serve(Path(temporary))
        else:
            done = build(Path(temporary))
            print(done.stdout, done.stderr, sep="", end="")
            if done.returncode == 0:
                shutil.rmtree(SITE, ignore_errors=True)
                shutil.move(Path(temporary, "site"), SITE)
            sys.exit(done.returncode)
