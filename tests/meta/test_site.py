"""The documentation as a site: every page is in the navigation, every link and anchor leads somewhere.

`make docs` builds it and checks the same with MkDocs; this needs neither MkDocs nor a browser.
"""

from __future__ import annotations

import re
from pathlib import Path

from docs.reference import SECTIONS, document

import stillframe
from stillframe import errors

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCS = REPOSITORY / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "bench")
"""docs/bench holds the parts that docs/BENCHMARKS.md is made of."""
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(text: str) -> set[str]:
    """As GitHub and the site make them of headings."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken(path: Path, text: str) -> list[str]:
    """The links in a document that lead nowhere, or out of the site."""
    found = []
    for link in LINK.findall(without_code(text)):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            found.append(f"{link}: no such file")
        elif DOCS in path.parents and DOCS not in target.parents:
            found.append(f"{link}: not part of the site")
        elif anchor and anchor not in anchors(text if target == path else target.read_text()):
            found.append(f"{link}: no such heading")
    return found


def test_a_broken_link_is_noticed() -> None:
    page, text = DOCS / "CLI.md", "# One\n\n## Two, and `three`\n\n```\n[x](none.md)\n```\n"
    for link in ("none.md", "FAILURES.md#none", "#none", "../README.md", "guides/tiers.md#slurm-"):
        assert broken(page, f"{text}[x]({link})"), link
    for link in ("FAILURES.md#the-phases", "#two-and-three", "guides/tiers.md#choosing-every", "https://example.org"):
        assert not broken(page, f"{text}[x]({link})"), link


def test_every_link_of_every_document_leads_somewhere() -> None:
    for path in [*PAGES, *REPOSITORY.glob("*.md")]:
        assert broken(path, path.read_text()) == [], path


def test_the_navigation_has_every_page_once() -> None:
    (nav,) = re.findall(r"^nav:\n((?:  .*\n)+)", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in PAGES)


def test_the_readme_leads_to_every_page() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    linked = {link.partition("#")[0] for link in LINK.findall(readme)}
    assert {f"docs/{path.relative_to(DOCS)}" for path in PAGES} <= linked
    assert len(readme.splitlines()) < 150


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert (DOCS / "API.md").read_text() == document(), "make docs writes it"
    named = {name for names in SECTIONS.values() for name in names}
    assert named == {name for name in stillframe.__all__ if not name.endswith("Error")}


def test_every_error_has_its_line_with_what_to_do() -> None:
    text = (DOCS / "ERRORS.md").read_text()
    kinds = {name for name in errors.__all__ if name.endswith("Error")} - {"StillframeError"}
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == kinds


def test_every_python_block_of_the_documents_is_run_by_a_test() -> None:
    """By a test that names its document."""
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("*.py"))
    for path in PAGES:
        if "```python" in path.read_text():
            assert f'"docs/{path.relative_to(DOCS)}"' in tests, path


def test_pages_load_nothing_from_elsewhere() -> None:
    """No fonts, and no diagrams that a script would be fetched for."""
    assert re.search(r"^  font: false", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    for path in PAGES:
        assert not re.search(r"```mermaid|!\[[^\]]*\]\(http|<script|<iframe|<img", path.read_text()), path


RETIRED = {
    "passed over": "skipped",
    "cannot be told": "cannot be determined",
    "cannot be looked at": "cannot be read",
    "cannot be had": "cannot be allocated",
    "can be had": "is available, is granted",
    "at their word": "is assumed",
    "mend ": "fix ",
}
"""Phrases that stopped new readers, and what to write."""


def test_plain_words_are_used() -> None:
    code = [path.read_text() for path in Path(stillframe.__file__).parent.rglob("*.py")]
    documents = [path.read_text() for path in [*PAGES, REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]]
    for text in (*code, *documents):
        words = " ".join(text.split()).lower()
        for phrase, better in RETIRED.items():
            at = re.search(rf"\b{phrase}", words)
            assert at is None, f"write “{better}”: …{words[at.start() - 60 : at.end() + 40]}…"
