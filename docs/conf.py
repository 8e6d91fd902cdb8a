"""Sphinx: `make docs` writes the site into build/docs."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import minidl  # noqa: E402

project, author = "minidl", "the minidl developers"
version = release = minidl.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"minidl {version}"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay short; docstrings give shapes and units
autodoc_use_type_comments = False  # there are none; looking for them would parse every function
autodoc_mock_imports = ["cupy", "mpi4py"]
default_role = "literal"  # docstrings write `name` for code
