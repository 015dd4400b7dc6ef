"""Folders of this machine for names on the Hub, and imports of optional libraries."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from flatfsdp.errors import ConfigValueError

# By library: the extra that installs it.
EXTRAS = {"transformers": "hf", "peft": "hf", "datasets": "hf", "huggingface_hub": "hf"}


def library(name: str, *, wanted_by: str) -> Any:
    """The library `name`.

    Raises:
        ConfigValueError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(name)
        install = f"pip install '.[{extra}]' in a clone of flatfsdp" if extra else f"pip install {name}"
        raise ConfigValueError(f"{wanted_by}: {error.name} is required but not installed: {install}") from error


def folder_of(name: str, *, kind: str = "model") -> Path:
    """The folder for `name`: a folder of this machine, or a repository of the Hugging Face Hub in its cache, where it
    is downloaded to if it is missing (`HF_HUB_OFFLINE=1`: never).

    Raises:
        ConfigValueError: there is no such folder, and the Hub has no such repository, or cannot be reached.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ConfigValueError(f"hf:{name}: there is no folder {str(path)!r}")
    hub = library("huggingface_hub", wanted_by=f"hf:{name}")
    for local in (True, False):  # the cache needs no network, and is fast
        try:
            return Path(hub.snapshot_download(name, repo_type=kind, local_files_only=local))
        except Exception as error:  # many classes: of the network, of names, of permissions
            reason = error
    why = str(reason).strip().partition("\n")[0]
    raise ConfigValueError(
        f"hf:{name}: there is no local folder of that name, and it could not be downloaded from the Hugging Face Hub: "
        f"{type(reason).__name__}: {why}"
    ) from reason
