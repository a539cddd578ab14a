"""Sphinx's settings of the documentation site; ``make docs`` builds it. Decision 37 says why it is made like this."""

from __future__ import annotations

import builtins
import os
import re
import sys
from pathlib import Path
from typing import Any

import featstore
import featstore.adapters.pyg
import featstore.adapters.ray
from featstore import OutOfCoreGraph

DOCS = Path(__file__).resolve().parent
for module in [each for name, each in sys.modules.items() if name.startswith("featstore.")]:
    vars(module).setdefault("OutOfCoreGraph", OutOfCoreGraph)  # many import it for type checkers alone; signatures name it
# Where files of the repository can be seen, such as https://host/owner/featstore/blob/main; without it their paths are shown.
REPOSITORY = os.environ.get("FEATSTORE_REPOSITORY", "").rstrip("/")

project = "featstore"
author = "The featstore developers"
copyright = author
version = release = featstore.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["plots"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as GitHub numbers them
smartquotes = False  # it would make a dash of the two hyphens of an option

html_theme = "furo"
html_title = f"featstore {release}"
html_copy_source = False
html_domain_indices = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

napoleon_google_docstring = False
napoleon_use_param = False  # the type line is prose, "integer array, shape (n,)", and not names to look up
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]  # else each would be a name to look up, or an entry beside its own
autodoc_member_order = "bysource"
autodoc_mock_imports = ["dgl"]  # no release of it on PyPI is for a torch of today
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
add_module_names = False

# A name in a docstring must be one of this reference. Types in signatures may be others' or internal.
nitpicky = True
nitpick_ignore_regex = [
    ("py:exc", rf"(?:{'|'.join(name for name in dir(builtins) if name[0].isupper())})"),
    ("py:class", r"(?!featstore\.).*|featstore\..*\..*"),
]


def link_outside(app: Any, page: str, source: list[str]) -> None:
    """Replace a page's links to files outside ``docs/``: by the repository's address, or by the path as text."""
    folder = Path(app.env.doc2path(page)).parent

    def replaced(link: re.Match[str]) -> str:
        path, _, anchor = link[2].partition("#")
        target = (folder / path).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        name = target.relative_to(DOCS.parent).as_posix()
        if REPOSITORY:
            return f"[{link[1]}]({REPOSITORY}/{name}{anchor and '#'}{anchor})"
        return link[1] if name in link[1] else f"{link[1]} (`{name}`)"

    source[0] = re.sub(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s]+)\)", replaced, source[0])


def keep_colons(app: Any, what: str, name: str, each: Any, options: Any, lines: list[str]) -> None:
    """Keep napoleon from taking what stands before a colon for the type of a property, by an empty comment before it."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def shorten(
    app: Any, what: str, name: str, each: Any, options: Any, arguments: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Write an array's type without its parameters, which the docstring has, and defaults that are made anew as ``...``."""

    def shown(text: str | None) -> str | None:
        text = text and re.sub(r"(numpy\.ndarray)\[.*?dtype\[[^\]]*\]\]", r"\1", text)
        return text and re.sub(r"<(?:factory|function \w+)>", "...", text)

    return shown(arguments), shown(result)


def setup(app: Any) -> None:
    """Connect what this file adds to Sphinx."""
    app.connect("source-read", link_outside)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", shorten)
