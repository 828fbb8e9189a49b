"""Sphinx's settings for `make docs`. The site is built without a network."""

import os
import re

from sphinx.util import logging

import deepcompile_zero3

project = "deepcompile_zero3"
version = release = deepcompile_zero3.__version__
html_title = f"{project} {release}"
html_theme = "furo"
html_copy_source = False
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

# Anchors of headings are those of a repository's web view, which pages are written for. A link to a
# file that is no page becomes a download of the file.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are listed once, by their class's docstring

# Names of other projects become links if DOCS_ONLINE is set, which reads inventories over the
# network. Those of this one need an entry in docs/reference/.
if os.environ.get("DOCS_ONLINE"):
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(collections|os|torch|typing)\..+")]


def adapt_links(app, docname, lines):
    """Makes links and anchors of the repository's web view those of the site, where they differ."""
    for number, text in enumerate(lines):
        text = text.replace("](../README.md", "](index.md")  # which includes it
        lines[number] = re.sub(r'<a id="(.+)"></a>', r"(\1)=", text)


# Parts of signatures that no reader knows, and what they stand for.
MEANT = {
    "<factory>": "...",
    "~deepcompile_zero3.sharding.fully_shard._AnyModule": (
        "~torch.nn.Module | list[~torch.nn.Module]"
    ),
}


def adapt_signature(app, what, name, obj, options, signature, returned):
    """Returns a signature, and the type that it returns, as a reader knows them."""

    def adapted(text):
        for part, meant in MEANT.items():
            text = text and text.replace(part, meant)
        return text

    return adapted(signature), adapted(returned)


def refuse_types_of_results(app, what, name, obj, options, lines):
    """Warns of a colon in the first line of "Returns:". Napoleon takes what precedes for a type."""
    if any(line.startswith(":rtype:") for line in lines):
        logging.getLogger(__name__).warning("%s: 'Returns:' is split at a colon", name)


def find_public_name(app, env, node, contnode):
    """Finds a public name that a docstring in a module below the package refers to."""
    if node.get("refdomain") != "py" or node["reftarget"].startswith(f"{project}."):
        return None
    target = f"{project}.{node['reftarget']}"
    return env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], target, node, contnode
    )


def skip_member(app, what, name, obj, skip, options):
    """Leaves out fields of named tuples, which docstrings of the classes describe."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app):
    """Connects the functions above."""
    app.connect("source-read", adapt_links)
    app.connect("autodoc-process-docstring", refuse_types_of_results)  # after napoleon
    app.connect("autodoc-process-signature", adapt_signature)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("missing-reference", find_public_name)
