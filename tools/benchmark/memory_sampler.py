"""Samples the memory of processes and of their control group, from another process.

`python -m tools.benchmark.memory_sampler PID...` reads names of phases, one per line, until an empty one. It writes the
samples of each phase as JSON. The proportional set size (PSS) counts a page that n processes map as 1/n in each. Socket
buffers are the system's, in no process's PSS; control groups of version 2 are charged for them.
"""

from __future__ import annotations

import json
import resource
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAUSE = 0.005  # seconds between two samples
_PAGE = resource.getpagesize()
_GROUPS = Path("/sys/fs/cgroup")


def pss(pid: int) -> dict[str, int]:
    """The PSS of a process in bytes, the shared memory in it, and the part without files (the rest is mostly code)."""
    sizes = {"Pss": 0, "Pss_Shmem": 0, "Pss_Anon": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in sizes:
            sizes[name] = 1024 * int(rest.split()[0])
    shared = sizes["Pss_Shmem"]
    return {"pss": sizes["Pss"], "pss shared": shared, "pss of no file": shared + sizes["Pss_Anon"]}


def charge_file() -> Path | None:
    """The file with the memory charged to this process's control group; None where none can be read."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for folder, name, mine in (
            (_GROUPS / "memory", "memory.usage_in_bytes", "memory" in controllers.split(",")),  # version 1
            (_GROUPS, "memory.current", controllers == ""),
        ):
            # A container may see its own group as the root.
            for candidate in (folder / path.lstrip("/") / name, folder / name) if mine else ():
                try:
                    int(candidate.read_text())
                except (OSError, ValueError):
                    continue
                return candidate
    return None


def socket_buffers() -> int:
    """The bytes in the system's TCP buffers of this network namespace, which no process maps."""
    line = next((line for line in Path("/proc/net/sockstat").read_text().splitlines() if line.startswith("TCP:")), "")
    words = line.split()
    return _PAGE * int(words[words.index("mem") + 1]) if "mem" in words else 0


def sample(pids: Sequence[int], charged: Path | None) -> dict[str, int]:
    """One sample of all processes together."""
    sizes = [pss(pid) for pid in pids]
    found = {name: sum(each[name] for each in sizes) for name in sizes[0]}
    found["sockets"] = socket_buffers()
    found["of no file, and sockets"] = found["pss of no file"] + found["sockets"]
    return found if charged is None else {**found, "charge": int(charged.read_text())}


def main() -> None:
    """Sample through all phases."""
    pids, charged = [int(word) for word in sys.argv[1:]], charge_file()
    phases: dict[str, dict[str, Any]] = {}
    print("ready", flush=True)
    while phase := sys.stdin.readline().strip():
        samples = []
        while not select.select([sys.stdin], [], [], PAUSE)[0]:
            samples.append(sample(pids, charged))
        phases[phase] = _summary(samples or [sample(pids, charged)])
    print(json.dumps({"charge file": str(charged or ""), "phases": phases}), flush=True)


def _summary(samples: Sequence[dict[str, int]]) -> dict[str, Any]:
    """The largest values, the last ones, and the number of samples."""
    return {"count": len(samples), "last": samples[-1]} | {
        "most": {name: max(each[name] for each in samples) for name in samples[-1]}
    }


if __name__ == "__main__":
    main()
