"""What each process of the rank pool runs: python -m tests.rankpool_worker CONNECTION-FD RANK STACKS-FILE."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from tests import groups
from tests.rankpool import Call, RankResult


def _end_with_parent() -> None:
    """End this process and all that it forked as soon as stdin closes: pytest is gone, however it went."""
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


def _answer(call: Call, rank: int) -> bytes:
    """Run the call in a process group of its own and pickle what came of it.

    The group is left at the start of the next call, not here: by then no rank is in a collective any more.
    """
    try:
        groups.leave()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(call.world_size))
        groups.join(dist.FileStore(call.store, call.world_size), rank, call.world_size)
        torch.manual_seed(0)
        module, function = call.target.split(":")
        value = getattr(importlib.import_module(module), function)(*call.args)
        return pickle.dumps(RankResult(value))
    except BaseException as e:  # DCP's own exception is no Exception, and no rank may end before it has answered
        return pickle.dumps(RankResult(None, type(e).__name__, str(e), traceback.format_exc()))


def main() -> None:
    """Answer calls until the pool closes the connection."""
    descriptor, rank, stacks = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    with stacks.open("w") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
        connection.send_bytes(pickle.dumps(RankResult()))
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_answer(pickle.loads(message), rank))


if __name__ == "__main__":
    main()
