"""Addresses at which a job can be reached."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from flatfsdp.trainer.launch import LOOPBACK
from tests.harness import commands
from tests.trainer.test_train import environment

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).parents[1] / "programs" / "listening.py"


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="reads /proc")
def test_ranks_of_the_own_launcher_listen_on_loopback_only(tmp_path: Path) -> None:
    # An interface that the environment names, as on machines of a cluster, is for jobs of several machines.
    others = [name for _, name in socket.if_nameindex() if name not in LOOPBACK]
    named = {"GLOO_SOCKET_IFNAME": "eth0"} if "eth0" in others else {}
    done = commands.run(PROGRAM, folder=tmp_path, environment=environment() | named, limit=120)
    assert done.returncode == 0, done.stderr
    expected = {"parent listens at 0100007F", "rank listens at 0100007F"}
    assert set(done.stdout.splitlines()) == expected
