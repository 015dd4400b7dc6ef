"""Effects of `import flatfsdp` on a process: modules are loaded, and nothing else changes."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.process

LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
MODULE_HOOKS = [f"_global_{name}_hooks" for name in ("forward", "forward_pre", "backward", "backward_pre")]


def settings(libraries: Any) -> Iterator[tuple[str, object]]:
    """Settings of the whole process that a library could change, by name."""
    yield "environment", dict(os.environ)
    yield "directory", (os.getcwd(), os.umask(os.umask(0o22)))
    yield "signals", {number: str(signal.getsignal(number)) for number in signal.valid_signals()}
    yield "hooks of the interpreter", (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook)
    yield "tracing", (sys.getprofile(), sys.gettrace(), faulthandler.is_enabled())
    yield "collector", (gc.isenabled(), gc.get_threshold(), len(gc.callbacks))
    yield "interpreter", (sys.getrecursionlimit(), sys.getswitchinterval(), locale.setlocale(locale.LC_ALL))
    yield "exit handlers", atexit._ncallbacks()  # type: ignore[attr-defined]
    yield "limits", ([resource.getrlimit(each) for each in LIMITS], os.getpriority(os.PRIO_PROCESS, 0))
    yield "threads", sorted(thread.name for thread in threading.enumerate())
    yield "warnings", list(warnings.filters)
    yield "logging", (logging.root.level, list(logging.root.handlers), logging.root.manager.disable)
    yield "processes", multiprocessing.get_start_method(allow_none=True)
    yield "calls to C libraries, the allocator's among them", libraries.call_count
    yield "torch's threads", (torch.get_num_threads(), torch.get_num_interop_threads())
    yield "torch's defaults", (torch.get_default_dtype(), torch.get_default_device(), torch.random.initial_seed())
    yield "torch's precision", (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    yield "torch's algorithms", (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
    yield "torch's autograd", (torch.is_grad_enabled(), torch.is_anomaly_enabled())
    yield "torch's module hooks", [len(getattr(torch.nn.modules.module, name)) for name in MODULE_HOOKS]
    yield "torch's devices", (dist.is_initialized(), torch.cuda.is_initialized())


def test_importing_the_library_changes_no_setting_of_the_process() -> None:
    command = [sys.executable, "-m", __name__]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "nothing changed\n", "")


def main() -> None:
    assert "flatfsdp" not in sys.modules
    torch.manual_seed(7)
    with patch.object(ctypes, "CDLL", wraps=ctypes.CDLL) as libraries:
        before = dict(settings(libraries))
        import flatfsdp
        import flatfsdp.wrap  # noqa: F401

        for name, after in settings(libraries):
            assert after == before[name], f"{name}: {before[name]} -> {after}"
    from flatfsdp.engine.config.arguments import check_arguments

    check_arguments(nn.Linear(2, 2), sharding_strategy="NO_SHARD", auto_wrap_policy=nn.Linear)  # which FSDP1 has, too
    assert not {"torch.distributed.fsdp", "torch.distributed.tensor"} & sys.modules.keys()
    print("nothing changed")


if __name__ == "__main__":
    main()
