"""Settings of the guide's site.

Sphinx reads the pages in Markdown by MyST, as the sites of jax, flax and optax do. Build it with

    pip install -e ".[docs]"
    sphinx-build --fail-on-warning examples/guide build/guide

and open `build/guide/index.html`. A page requests nothing from other hosts, and the search works
without a server. `-D repository=URL` puts the address of the repository into the notebooks.
"""

import re
import sys
from pathlib import Path
from typing import Any

import docutils.nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import stepfold

sys.path.insert(0, str(Path(__file__).parent))
import generated

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
_modules = "|".join(stepfold._PUBLIC)
nitpick_ignore_regex = [("py:.*", rf"(?s)(?!stepfold\.(({_modules})\.)?\w+$).*")]
# In a docstring, `name` is the name's reference if it has one, and code otherwise.
default_role = "py:obj"

autodoc_member_order = "bysource"
napoleon_attr_annotations = False  # as autodoc_typehints
autodoc_typehints = "none"  # the aliases are spelled out, and fill a page
autodoc_preserve_defaults = True
codeautolink_concat_default = True  # a page is one program
codeautolink_global_preface = "import stepfold as sf"  # also before the set-up at its end
codeautolink_warn_on_missing_inventory = False

html_theme = "furo"
html_title = f"stepfold {release}"
html_static_path = ["static"]
html_logo = html_favicon = "static/logo.svg"
html_css_files = ["guide.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# `sf.name` in a text or a docstring, and the full name under which the reference has it.
PUBLIC = generated.public_names()


class LinkedNames(SphinxTransform):
    """Link `sf.name` and `sf.name(…)` in a text to the reference, and examples to their pages."""

    default_priority = 400

    def apply(self) -> None:
        """Wrap the literals."""
        for literal in list(self.document.findall(docutils.nodes.literal)):
            if example := re.fullmatch(r"examples/(\w+)\.py", literal.astext()):
                self._link_example(literal, f"examples/{example[1]}")
                continue
            target = PUBLIC.get(literal.astext().partition("(")[0])
            is_linked = isinstance(literal.parent, docutils.nodes.reference | pending_xref)
            if target is None or is_linked or literal.rawsource.startswith(":"):
                continue
            link = pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname
            )
            literal.replace_self(link)
            link += literal

    def _link_example(self, literal: docutils.nodes.literal, page: str) -> None:
        if isinstance(literal.parent, pending_xref) and literal.parent["refdomain"] == "py":
            literal.parent.replace_self(literal)  # a docstring's, which looks for an object
        docname = self.env.docname
        if docname != page and not isinstance(
            literal.parent, docutils.nodes.reference | pending_xref
        ):
            uri = self.app.builder.get_relative_uri(docname, page)
            link = docutils.nodes.reference("", "", refuri=uri, internal=True)
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


def find_public(
    app: Sphinx, env: Any, node: pending_xref, content: docutils.nodes.Element
) -> docutils.nodes.reference | None:
    """Link `hooks.name`, `sf.name`, and in any module the names of `stepfold`."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].partition("(")[0]
    target = target.removeprefix("stepfold.").removeprefix("sf.")
    if (name := PUBLIC.get(f"sf.{target}")) is None:
        return None
    domain, page = env.get_domain("py"), node["refdoc"]
    return domain.resolve_xref(env, page, app.builder, "obj", name, node, content)


def offer_notebook(_app: Sphinx, page: str, source: list[str]) -> None:
    """Link the notebook of a tutorial below its title."""
    if page in generated.NOTEBOOKS:
        name = page.rpartition("/")[2]
        link = f"{{download}}`Download this page as a notebook <{name}.ipynb>`"
        title, _, rest = source[0].partition("\n\n")
        source[0] = f"{title}\n\n{link}, for Jupyter or Colab. It needs no GPU.\n\n{rest}"


def make_accessible(
    _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _document: Any
) -> None:
    """Give the captions of the sidebar a level, and let the keyboard scroll code and tables."""
    for name, old, new in (
        ("furo_navigation_tree", 'role="heading"', 'role="heading" aria-level="2"'),
        ("body", "<pre>", '<pre tabindex="0">'),
        ("body", '<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
    ):
        context[name] = context.get(name, "").replace(old, new)


def setup(app: Sphinx) -> None:
    """Write the pages that are made from other files, and register the transforms."""
    app.add_config_value("repository", "<repository URL>", "env")
    app.connect("config-inited", lambda _, config: generated.write_all(config.repository))
    app.connect("missing-reference", find_public)
    app.connect("source-read", offer_notebook)
    app.connect("html-page-context", make_accessible, priority=900)
    app.add_transform(LinkedNames)
    app.add_transform(DarkPictures)
