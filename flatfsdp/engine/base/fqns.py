"""The names under which state dicts know parameters: those of the model as it was before anything wrapped it.

[Note: clean names] A path through the model without the attributes under which wrappers hold what they wrap: ours,
torch's checkpoint_wrapper and torch.compile's. A parameter that several modules hold has several names, the first of
which, in the order of `modules()`, is the one.
"""

from __future__ import annotations

WRAPPED, COMPILED = "_fsdp_wrapped_module", "_orig_mod"
TRANSPARENT = frozenset({WRAPPED, "_checkpoint_wrapped_module", COMPILED})


def fqn(path: str, name: str) -> str:
    """The name of what is `name` inside the module at `path`, which is "" for the outermost one."""
    return f"{path}.{name}" if path else name


def clean(name: str) -> str:
    """`name`, a path of attributes, without those of wrappers."""
    return ".".join(part for part in name.split(".") if part not in TRANSPARENT)


def clean_text(text: str) -> str:
    """`text`, in which there are paths, without the attributes of wrappers."""
    for part in TRANSPARENT:
        text = text.replace(f"{part}.", "")
    return text
