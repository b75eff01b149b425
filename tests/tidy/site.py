"""Hooks of the documentation site (`mkdocs.yml`): pages from outside `docs/`, and links that work in both places.

On a code host, links of Markdown files are paths in the repository. `PAGES` lists the files outside `docs/` that are
pages of the site; a link to one of them leads to its page. A link to any other file of the repository becomes its text,
with the path as a tooltip. A link to a file that does not exist is a warning, which `mkdocs build --strict` refuses.
"""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
SERVICES = "services/gpu_autoscaler_services"
# Path in the repository -> path in the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "deploy/charts/gpu-autoscaler/README.md": "chart.md",
    "examples/README.md": "examples.md",
    "schemas/README.md": "reference/contracts.md",
} | {
    path.relative_to(ROOT).as_posix(): f"services/{path.parent.name}.md"
    for path in sorted((ROOT / SERVICES).glob("*/README.md"))
}
_SOURCES = {page: source for source, page in PAGES.items()}
# A fenced block or code in backticks, which stay as they are, or a link: text, target, anchor.
_LINK = re.compile(r"(?ms)^```.*?^```|`[^`\n]+`(?!\])|\[((?:[^\]`]|`[^`]*`)*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_CELL, _NAME, _BREAK = re.compile(r"(?s)<td.*?</td>"), re.compile(r"<code>[^<]+"), re.compile(r"[_./](?=\w)")
log = logging.getLogger("mkdocs.plugins.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside `docs/`."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrite the links that leave `docs/`."""
    site = page.file.src_uri
    rewritten, missing = rewrite_links(markdown, site)
    for target in missing:
        log.warning("%s: link to %s, which does not exist", _SOURCES.get(site, f"docs/{site}"), target)
    return rewritten


def on_page_content(html: str, **_: object) -> str:
    """Allow line breaks within the long names of tables: behind an underscore, dot or slash."""
    return _CELL.sub(lambda cell: _NAME.sub(lambda name: _BREAK.sub(r"\g<0><wbr>", name[0]), cell[0]), html)


def rewrite_links(markdown: str, site: str) -> tuple[str, list[str]]:
    """Return the text of a page for the site, and its links to files that do not exist. `site`: path in the site."""
    folder = posixpath.dirname(_SOURCES.get(site, f"docs/{site}"))
    missing = []

    def rewrite(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        if target is None or ":" in target or target.startswith("/"):
            return match.group(0)  # code, another host, or an absolute path, which the build refuses
        path = posixpath.normpath(posixpath.join(folder, target))
        inside = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if not (ROOT / path).exists():
            missing.append(target)
        if inside is None:
            return f'<span class="file" title="{path}">{text}</span>'
        return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(site) or '.')}{anchor or ''})"

    return _LINK.sub(rewrite, markdown), missing
