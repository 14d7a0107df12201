"""Makes pages of the README and the changelog of each package while the site is built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PACKAGES = Path(__file__).parents[2] / "packages"
FIRST = ("core", "ddp", "fsdp", "deepspeed")  # in this order; the others follow by name


def names() -> list[str]:
    """Return the folders of the packages, in the order of the navigation."""
    found = {path.parent.name for path in PACKAGES.glob("*/README.md")}
    return [*FIRST, *sorted(found - set(FIRST))]


def distribution(name: str) -> str:
    """Return the distribution of a folder."""
    return "dstrat" if name == "core" else f"dstrat-{name}"


def on_config(config: MkDocsConfig) -> None:
    """Put the pages into the navigation."""
    (section,) = (entry["Packages"] for entry in config.nav if "Packages" in entry)
    section[:] = [f"packages/{name}.md" for name in names()]
    entries = (entry for group in config.nav for entries in group.values() for entry in entries)
    (section,) = (entry["Changelogs"] for entry in entries if "Changelogs" in entry)
    section[:] = [{distribution(name): f"changelogs/{name}.md"} for name in names()]


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the pages; links that lead from a README into docs lead to the pages of the site."""
    for name in names():
        text = (PACKAGES / name / "README.md").read_text(encoding="utf-8")
        text = text.replace("](../../docs/", "](../")
        text = text.replace("](https://pypi.org/project/dstrat/)", "](core.md)")
        text = re.sub(r"\]\(\.\./(\w+)/README\.md", r"](\1.md", text)
        text = re.sub(r"\[([^\]]+)\]\(\.\./\.\./[^)]+\)", r"\1", text)  # other files of the repository
        text += f"\n[Changelog](../changelogs/{name}.md)\n"
        files.append(File.generated(config, f"packages/{name}.md", content=text))
        changes = (PACKAGES / name / "CHANGELOG.md").read_text(encoding="utf-8")
        files.append(File.generated(config, f"changelogs/{name}.md", content=changes))


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Let links of guides to a README lead to the page that is made of it."""
    if "/" in page.file.src_uri:
        return markdown
    return re.sub(r"\]\(\.\./packages/(\w+)/README\.md", r"](packages/\1.md", markdown)
