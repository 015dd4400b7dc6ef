"""Private names of torch.compile, as `_torch.py` has those of torch: what it compiles, and whether it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .fqns import COMPILED

# The callback that torch.compile runs for each frame; None if the caller is not part of a compiled function. Whether it
# runs one is not shown by anything public once a function was left out of the graph.
_compiler: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def stay_out_of_graphs() -> None:
    """Let torch.compile skip flatfsdp's own functions, and compile the modules that they call."""
    # The public way excludes one function at a time; the engine has hundreds. Imported here, since the import takes
    # seconds, and has already happened if anything was compiled.
    from torch._dynamo import trace_rules

    trace_rules.add("flatfsdp")


def is_compiled_around() -> bool:
    """Whether the caller runs inside a compiled function; it is itself excluded from the compilation."""
    if torch.compiler.is_compiling():
        stay_out_of_graphs()
    return callable(_compiler())


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module` was compiled, in place (which nothing public shows) or in a module around it."""
    return module._compiled_call_impl is not None or COMPILED in module._modules
