"""The concatenated tokens of all records, in a file that the ranks of a machine map and later runs reuse.

The first process that needs the file writes it, under a lock; the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.data_loading.datasets import TokenWindows
from flatfsdp.trainer.hub.records import Records

FOLDER = "FLATFSDP_CACHE"  # the environment variable for the folder; by default inside the user's cache


def packed_on_disk(records: Records, encode: Any, length: int) -> TokenWindows:
    """Windows over the tokens of all `records`, made by `encode`.

    Raises:
        ConfigValueError: all tokens together do not fill a window; the folder cannot be written to.
    """
    folder = Path(os.environ.get(FOLDER) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "flatfsdp"))
    path = folder.expanduser() / "tokens" / f"{_key(records, encode)}.i32"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _write(path, records, encode)
    except OSError as error:
        raise ConfigValueError(
            f"packing: cannot write the tokens to {path.parent}: {error.strerror}. Set {FOLDER} to another folder"
        ) from None
    count = path.stat().st_size // 8
    if count < length:
        raise ConfigValueError(f"{records.name}: its {count} tokens do not fill one sample of sequence_length={length}")
    tokens, labels = torch.from_file(str(path), shared=False, size=2 * count, dtype=torch.int32).view(2, count).unbind()
    return TokenWindows(tokens, context=length, labels=labels)


def _write(path: Path, records: Records, encode: Callable[[Any], Any]) -> None:
    tokens, labels = array("i"), array("i")
    for record in records:
        for token, label in encode(record).pairs():
            tokens.append(token)
            labels.append(label)
    fresh = path.with_suffix(f".{os.getpid()}")
    with fresh.open("wb") as file:
        tokens.tofile(file)
        labels.tofile(file)
    os.replace(fresh, path)


def _key(records: Records, encode: Any) -> str:
    tokenizer = encode.tokenizer
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = fast.to_str() if fast is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    parts = [records.identity, words, str(getattr(tokenizer, "chat_template", "")), encode.column]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
