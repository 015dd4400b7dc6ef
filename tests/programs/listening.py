"""Two ranks of the own launcher print the addresses at which they and their parent listen."""

from __future__ import annotations

import multiprocessing
import os
import sys

import torch
import torch.distributed as dist

from flatfsdp.trainer.launch import Placement, RankContext, run


def addresses(pid: int) -> set[str]:
    """The addresses at which a process listens for TCP, as "HEX-ADDRESS" of /proc/net."""
    sockets = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    found.add(fields[1].partition(":")[0])
    return found


def job(world: RankContext) -> int:
    group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1), group=group)
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    for who, pid in (("rank", os.getpid()), ("parent", parent.pid)):
        sys.stdout.write(f"{who} listens at {','.join(sorted(addresses(pid)))}\n")
    sys.stdout.flush()
    dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(run(job, Placement(2, "cpu")))
