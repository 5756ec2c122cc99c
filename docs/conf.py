"""Sphinx: the pages of this folder, and a reference made from the docstrings (``make docs``)."""

project = "hetero_strategy"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "index"
exclude_patterns = ["README.md"]
html_theme = "furo"
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # Lightning's own are for its own site
suppress_warnings = ["myst.xref_missing", "myst.header", "misc.highlighting_failure"]  # links to files beside docs/
