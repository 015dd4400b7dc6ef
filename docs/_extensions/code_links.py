"""Makes code in running text a link where the manual documents it.

Pages stay plain Markdown: `FullyShardedDataParallel`, `flatfsdp.join(model)` and `checkpoint.save` are found in the
reference by the part before a bracket. A name that several documented objects end with stays code, and so does that of
an attribute alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

NAME = re.compile(r"(?:model\.)?([A-Za-z_][\w.]*)(?:\(.*\))?")


class CodeLinks(SphinxPostTransform):
    """Replaces a literal by a reference around it."""

    default_priority = 20

    def run(self, **kwargs: Any) -> None:
        domain = self.env.domains.python_domain
        known: dict[str, set[str]] = defaultdict(set)
        for full in domain.objects:
            parts = full.split(".")
            for first in range(len(parts)):
                known[".".join(parts[first:])].add(full)
        for node in [*self.document.findall(nodes.literal)]:
            found = NAME.fullmatch(node.astext())
            if found is None or isinstance(node.parent, (nodes.reference, nodes.title)) or "xref" in node["classes"]:
                continue
            name = found[1]
            targets = known.get(name, set())
            target = name if name in targets else next(iter(targets)) if len(targets) == 1 else preferred(targets)
            if target is None:
                continue
            entry = domain.objects[target]
            alone = "." not in name and "(" not in node.astext()
            word = entry.objtype == "method" and "_" not in name
            if alone and (word or entry.objtype in ("attribute", "property")):
                continue  # rather an argument of that name
            link = nodes.reference("", "", internal=True, reftitle=target)
            link["refuri"] = self.app.builder.get_relative_uri(self.env.docname, entry.docname) + f"#{entry.node_id}"
            node.replace_self(link)
            link += node


def preferred(targets: set[str]) -> str | None:
    """Of several objects of one name the wrapper's method, which other classes repeat."""
    of_wrapper = [each for each in targets if each.startswith("flatfsdp.FullyShardedDataParallel.")]
    top = [each for each in targets if each.count(".") == 1]
    return (top or of_wrapper or [None])[0] if len(top or of_wrapper) <= 1 else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(CodeLinks)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
