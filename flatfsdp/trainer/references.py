"""From "package.module:name" to the object."""

from __future__ import annotations

import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

from flatfsdp.errors import ConfigValueError, did_you_mean, refuse_value
from flatfsdp.trainer.settings import REFERENCE


def resolve(reference: Any, *, argument: str) -> Any:
    """The object that a text of the form `REFERENCE` names; what is no text is returned as it is.

    Modules of the current directory can be imported, as by `python -m`.

    Raises:
        ConfigValueError: there is no such module or name, with the nearest one; the import failed, with the exception
            as its cause. Begins with `argument`.
    """
    if not isinstance(reference, str):
        return reference
    if not REFERENCE.fullmatch(reference):
        refuse_value(argument, reference, "'package.module:name'")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(reference)
    except ModuleNotFoundError as error:
        name = error.name or ""
        if not re.match(rf"{re.escape(name)}\b", reference):  # a module that the named one imports
            raise ConfigValueError(f"{argument}: importing {reference!r} failed: {error}") from error
        here = [path.stem for path in Path.cwd().glob("*.py")] if "." not in name else []
        hint = f"looked in {os.getcwd()} and where Python looks. {did_you_mean(name, here)}"
        raise ConfigValueError(f"{argument}: there is no module {name!r}; {hint}".rstrip()) from None
    except Exception as error:
        trace = error.__traceback__
        if isinstance(error, AttributeError) and trace and trace.tb_next and not trace.tb_next.tb_next:
            # Of the module or the class, not of code that the import runs.
            name, owner = error.name or "", getattr(error.obj, "__name__", "the object")
            there = [each for each in dir(error.obj) if each.isidentifier() and not each.startswith("_")]
            hint = did_you_mean(name, there) or f"There are {', '.join(there) or 'no public names'}."
            raise ConfigValueError(f"{argument}: {owner} has no {name!r}. {hint}") from None
        why = f"{type(error).__name__}: {error}"
        raise ConfigValueError(f"{argument}: importing {reference!r} failed: {why}") from error
