"""Settings of the guide's site.

Sphinx reads the pages in Markdown by MyST, as the sites of jax, flax and optax do. Build it with

    pip install -e ".[docs]"
    sphinx-build --fail-on-warning examples/guide build/guide

and open `build/guide/index.html`. A page requests nothing from other hosts, and the search works
without a server.
"""

import docutils.nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import stepfold
from stepfold import adapter

project = "stepfold"
author = "the developers of stepfold"
copyright = author  # noqa: A001 - Sphinx gives the name
version = release = stepfold.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # docstrings in Google style
    "sphinx_codeautolink",  # a name in a block of code links to its reference
    "sphinx_copybutton",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Only public names of stepfold must resolve: those of others would need their inventories.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?s)(?!stepfold\.(adapter\.)?\w+$).*")]
# In a docstring, `name` is the name's reference if it has one, and code otherwise.
default_role = "py:obj"

autodoc_member_order = "bysource"
napoleon_attr_annotations = False  # as autodoc_typehints
autodoc_typehints = "none"  # the aliases are spelled out, and fill a page
autodoc_preserve_defaults = True
codeautolink_concat_default = True  # a page is one program
codeautolink_warn_on_missing_inventory = False

html_theme = "furo"
html_title = f"stepfold {release}"
html_static_path = ["static"]
html_css_files = ["guide.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

PUBLIC = {f"sf.{name}": f"stepfold.{name}" for name in stepfold.__all__}
PUBLIC |= {f"stepfold.adapter.{name}": f"stepfold.adapter.{name}" for name in adapter.__all__}


class LinkedNames(SphinxTransform):
    """Let `sf.name` and `sf.name(…)` in the text of a page link to the reference."""

    default_priority = 400

    def apply(self) -> None:
        """Wrap the literals."""
        for literal in list(self.document.findall(docutils.nodes.literal)):
            target = PUBLIC.get(literal.astext().partition("(")[0])
            is_linked = isinstance(literal.parent, docutils.nodes.reference | pending_xref)
            if target is None or is_linked or literal.rawsource.startswith(":"):
                continue
            link = pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname
            )
            literal.replace_self(link)
            link += literal


class DarkPictures(SphinxTransform):
    """Show `name-dark.svg` in place of `name-light.svg` on a dark page, and likewise for PNG."""

    default_priority = 100  # before Sphinx collects the images

    def apply(self) -> None:
        """Add the dark pictures."""
        for light in list(self.document.findall(docutils.nodes.image)):
            name, is_pair, kind = light["uri"].rpartition("-light.")
            if is_pair and kind in ("svg", "png"):
                dark = light.deepcopy()
                dark["uri"] = f"{name}-dark.{kind}"
                light["classes"].append("only-light")
                dark["classes"].append("only-dark")
                light.parent.insert(light.parent.index(light) + 1, dark)


def setup(app: Sphinx) -> None:
    """Register the transforms."""
    app.add_transform(LinkedNames)
    app.add_transform(DarkPictures)
