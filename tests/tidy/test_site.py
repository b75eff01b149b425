"""The site of the documentation: it builds without a warning, asks nothing of the internet, and misses no page."""

import html.parser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tidy.site import ROOT, rewrite_links

README_LINES_MAX = 120
# Of a page: what a browser loads by itself.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of this checkout as `make docs` does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the site is made from, to break; all other files are empty."""
    copy = tmp_path / "checkout"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md") or name.startswith(("docs/", "mkdocs.yml", "tests/tidy/site.py")):
            shutil.copyfile(ROOT / name, copy / name)
        else:
            (copy / name).touch()
    return copy


def tracked(*patterns: str) -> list[str]:
    """Return the files of the repository, new ones included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in sorted(set(listed)) if (ROOT / name).is_file()]


class _Loaded(html.parser.HTMLParser):
    """Collects the addresses that a browser loads with the page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADED and values.get("rel") != "canonical":
            self.addresses.append(values.get(LOADED[tag]) or "")


def loaded(text: str) -> list[str]:
    """Return the addresses on other hosts that the page loads."""
    parser = _Loaded()
    parser.feed(text)
    return [address for address in parser.addresses if re.match(r"(?:\w+:)?//", address)]


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    """Neither fonts nor scripts: the site works without the internet."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    assert {page.name: found for page in pages if (found := loaded(page.read_text(encoding="utf-8")))} == {}
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']*", styles) == []


def test_a_page_that_loads_from_another_host_is_found() -> None:
    """A script and a font; a link that a reader follows is none."""
    text = '<script src="https://cdn.example/x.js"></script><link href="//fonts.example/f.css"><a href="https://a.example">'
    assert loaded(text) == ["https://cdn.example/x.js", "//fonts.example/f.css"]


def test_the_search_index_has_every_page(site: Path) -> None:
    """A reader finds a metric and a service by name."""
    index = (site / "search/search_index.json").read_text(encoding="utf-8")
    for page in (
        "reference/metrics.html",
        "services/scaler.html",
        "designs/005-resync.html",
        "contributing/index.html",
    ):
        assert page in index
    assert "gpu_autoscaler_bus_connected" in index  # whole, although the page may break the line in it


def test_links_work_on_a_code_host_as_well() -> None:
    """Each relative link of each Markdown file leads to a file or folder of the repository."""
    broken = []
    for name in tracked("*.md"):
        text = re.sub(r"(?ms)^```.*?^```", "", (ROOT / name).read_text(encoding="utf-8"))
        for target, _ in _LINK.findall(text):
            if ":" not in target and not ((ROOT / name).parent / target).exists():
                broken.append(f"{name}: {target}")
    assert broken == []


def test_the_readme_fits() -> None:
    """What it is, for whom, and the first steps; everything else is a page."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES_MAX


def test_a_broken_page_fails_the_build(checkout: Path) -> None:
    """A page outside of the navigation, and each kind of wrong link; a whole checkout has no such warning."""
    assert build(checkout, checkout / "out").returncode == 0
    broken = {
        "docs/orphan.md": "# Orphan\n",
        "docs/replay.md": "[a](nowhere.md) [b](operations.md#no-such-heading) [c](/operations.md)\n",
        "docs/clouds.md": "[a](../tests/no_test.py)\n",
        "CONTRIBUTING.md": "[a](docs/no_page.md)\n",
    }
    for name, text in broken.items():
        with (checkout / name).open("a", encoding="utf-8") as page:
            page.write("\n" + text)
    built = build(checkout, checkout / "out")
    assert built.returncode != 0
    for complaint in ("orphan.md", "nowhere.md", "no-such-heading", "/operations.md", "no_test.py", "docs/no_page.md"):
        assert complaint in built.stderr


def test_designs_have_one_form_and_one_numbering() -> None:
    """Numbers without a gap, in the title as well; context, options with the chosen one, decision, consequences."""
    designs = sorted((ROOT / "docs/designs").iterdir())
    for number, path in enumerate(designs, 1):
        text = path.read_text(encoding="utf-8")
        assert path.name.startswith(f"{number:03}-")
        assert text.startswith(f"# {number}. ")
        assert re.findall(r"(?m)^## (.+)$", text) == ["Context", "Options", "Decision", "Consequences"]
        assert text.count("(chosen)") == 1
    assert len(designs) >= 7


def test_links_lead_to_pages_or_become_text() -> None:
    """From a page of `docs/` and from one outside; code stays as it is."""
    text, missing = rewrite_links(
        "[a](../CONTRIBUTING.md#commits) [b](replay.md) [`c`](../Makefile) `[d](x)`", "usage.md"
    )
    assert text == (
        '[a](contributing/index.md#commits) [b](replay.md) <span class="file" title="Makefile">`c`</span> `[d](x)`'
    )
    assert missing == []
    text, missing = rewrite_links("[a](docs/DESIGN.md) [b](docs/none.md)", "contributing/index.md")
    assert (text, missing) == ("[a](../DESIGN.md) [b](../none.md)", ["docs/none.md"])
