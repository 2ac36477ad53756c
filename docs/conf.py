"""Sphinx: `make docs` builds docs/ into build/docs; warnings are errors, examples are executed."""

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # pictures.py, for cells

project = "jaxring"
author = "the jaxring authors"
version = release = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"][
    "version"
]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]

html_theme = "sphinx_book_theme"
html_title = f"jaxring {version}"
html_theme_options = {"show_toc_level": 2, "home_page_in_toc": True}

# -- Markdown and executed pages (those with a jupytext header) ------------------------------------
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist", "smartquotes"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 120  # seconds, of a cell
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

# -- The API reference -----------------------------------------------------------------------------
autodoc_typehints = "none"  # the docstrings give shapes and dtypes
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # else fields of named tuples would be described twice
default_role = "code"


def indented_code_is_literal(app, what, name, obj, options, lines):
    """Docstrings show code by four more columns, as Markdown does; reStructuredText wants "::"."""
    at = 0
    while at < len(lines) - 2:
        line, blank, following = lines[at : at + 3]
        indent, deeper = (len(t) - len(t.lstrip()) for t in (line, following))
        if line.strip() and not blank.strip() and following.strip() and deeper >= indent + 4:
            if not line.rstrip().endswith("::"):
                lines[at + 1 : at + 1] = ["", " " * indent + "::"]
            at += 2
            while at < len(lines) and (
                not lines[at].strip() or len(lines[at]) - len(lines[at].lstrip()) > indent
            ):
                at += 1
            continue
        at += 1


def setup(app):
    # Before napoleon (500), which takes the sections apart.
    app.connect("autodoc-process-docstring", indented_code_is_literal, priority=400)
