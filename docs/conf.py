"""Sphinx builds the manual: `make docs`."""

from transformer import __version__

project = "transformer"
copyright = "the transformer authors"
release = version = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"transformer {__version__}"
html_show_sphinx = False
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests execute the notebook; the site shows its stored outputs
autodoc_member_order = "bysource"
autodoc_mock_imports = ["lm_eval"]  # an extra
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
copybutton_prompt_text = "$ "
