"""python tools/dead_links.py FOLDER: dead links and pictures of a built site; exit code 1 if there are any.

Links to other sites are not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The targets of a page, and its references."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.targets.add(value)
            if name in ("href", "src") and value:
                self.references.append(value)


def dead_links(site: Path) -> list[str]:
    """One line for each dead link: page and reference."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    if not pages:
        return [f"{site}: no pages"]
    dead = []
    for path, page in pages.items():
        for reference in page.references:
            parts = urlsplit(reference)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            lost = target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].targets
            if not target.exists() or lost:
                dead.append(f"{path.relative_to(site.resolve())}: {reference}")
    return sorted(set(dead))


if __name__ == "__main__":
    found = dead_links(Path(sys.argv[1]))
    print(*found, sep="\n", end="\n" * bool(found), file=sys.stderr)
    sys.exit(bool(found))
