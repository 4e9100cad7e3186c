"""Settings of the documentation's site, built by `make docs`.

The sources are the Markdown files as a forge shows them, below the root of the repository:
links between them, and to files beside them, are the same in both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "polytrain"
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/reference/*.md", "*.md"]
exclude_patterns = [".*", "build", "dist", "results"]
extensions = ["myst_parser"]
myst_heading_anchors = 4
nitpicky = True

html_theme = "furo"
html_title = "polytrain"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["assets"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_theme_options = {"top_of_page_buttons": []}

LINK = re.compile(r"\[(?P<title>[^\]]+)\]\((?P<page>[^)#:]+\.md)\)")


def contents(index: str) -> str:
    """Make a hidden table of contents of each section of the index, of the links it has."""
    tables = []
    for section in index.split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        pages = "\n".join(f"{each['title']} <{each['page']}>" for each in LINK.finditer(text))
        tables.append(f"```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{pages}\n```\n")
    return "\n".join(tables)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the tables of contents to the index: on a forge its lists of links are enough."""
    if page == root_doc:
        source[0] += "\n" + contents(source[0])


def setup(app: Sphinx) -> None:
    """Connect what Sphinx calls for each page."""
    app.connect("source-read", add_contents)
