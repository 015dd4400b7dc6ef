"""The names of parameters in state dicts: those of the model before it was wrapped.

[Note: clean names] A path through the model without the attributes of wrappers for their wrapped modules: those of
flatfsdp, torch's checkpoint_wrapper and torch.compile. A parameter in several modules has several names; the first one,
in the order of `modules()`, is used.
"""

from __future__ import annotations

WRAPPED, COMPILED = "_fsdp_wrapped_module", "_orig_mod"
TRANSPARENT = frozenset({WRAPPED, "_checkpoint_wrapped_module", COMPILED})


def fqn(path: str, name: str) -> str:
    """The name of attribute `name` of the module at `path`, which is "" for the root module."""
    return f"{path}.{name}" if path else name


def clean(name: str) -> str:
    """`name`, a path of attributes, without the attributes of wrappers."""
    return ".".join(each for each in name.split(".") if each not in TRANSPARENT)


def clean_text(text: str) -> str:
    """`text`, which contains paths, without the attributes of wrappers."""
    for each in TRANSPARENT:
        text = text.replace(f"{each}.", "")
    return text
