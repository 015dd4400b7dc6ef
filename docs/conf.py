"""Settings of Sphinx. `tools/docs` builds the site; a warning is an error there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

project = "flatfsdp"
author = "The flatfsdp authors"
project_copyright = author
_source = (HERE.parent / "flatfsdp" / "__init__.py").read_text(encoding="utf-8")
version = release = re.findall(r'^__version__ = "([^"]+)"', _source, flags=re.MULTILINE)[0]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "code_links",
    "settings_types",
]
exclude_patterns = ["_build", "README.md"]
nitpicky = False
default_role = "code"  # `name` in a docstring, as in Markdown

# Every heading is a target, and a link to one that is missing is an error.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist", "attrs_block"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # an attribute that is also a member is described once
napoleon_custom_sections = [("Example (in a process group of one rank)", "Example")]

html_theme = "furo"
html_title = f"flatfsdp {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_selector = "div.highlight-python pre, div.highlight-sh pre, div.highlight-toml pre"  # not output


def without_notes(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Takes references to notes out of docstrings: they are for readers of the source."""
    text = re.sub(r"\s*(?:\(\[Note: [^]]+\]\)|\[Note: [^]]+\])", "", "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", without_notes, priority=400)  # type: ignore[attr-defined]
