"""What each rank of `wall.py` does for another project: one row, several times, and the samples to the same file.

Called with the file of the plan and the row, by an interpreter that can import that project.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from emulated import EmulatedModel, OneInTurn, interface_bytes, train

TIMEOUT = timedelta(minutes=5)
PERIOD_STEPS = 8
LIGHTHOUSE_PORT, STORE_PORT = 29510, 29511

Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


@contextlib.contextmanager
def accelerate_local_sgd(emulated: EmulatedModel) -> Iterator[Trained]:
    """Hugging Face accelerate's LocalSGD."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(emulated)
    optimizer = OneInTurn(emulated.parameters())
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=PERIOD_STEPS, enabled=True) as local_sgd:
        optimizer.register_step_post_hook(lambda *_: local_sgd.step())
        yield model, optimizer


@contextlib.contextmanager
def torchft_local_sgd(emulated: EmulatedModel) -> Iterator[Trained]:
    """torchft's LocalSGD: each host is a replica of its own, rank 0's has the lighthouse."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import LocalSGD

    rank, size, first = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    lighthouse = LighthouseServer(bind=f"[::]:{LIGHTHOUSE_PORT}", min_replicas=size) if rank == 0 else None
    address = own_address(first)
    store = dist.TCPStore(address, STORE_PORT, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=size,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{first}:{LIGHTHOUSE_PORT}",
        replica_id=f"host{rank}",
        hostname=address,
        init_sync=False,
    )
    optimizer = OneInTurn(emulated.parameters())
    with LocalSGD(manager, emulated, optimizer, sync_every=PERIOD_STEPS):
        yield emulated, optimizer
    manager.shutdown()
    del lighthouse


@contextlib.contextmanager
def horovod_every_step(emulated: EmulatedModel) -> Iterator[Trained]:
    """Horovod's DistributedOptimizer."""
    import horovod.torch as hvd

    hvd.init()
    optimizer = OneInTurn(emulated.parameters())
    yield emulated, hvd.DistributedOptimizer(optimizer, named_parameters=emulated.named_parameters())


PEERS: dict[str, tuple[Callable[[EmulatedModel], contextlib.AbstractContextManager[Trained]], int]] = {
    f"accelerate:H={PERIOD_STEPS}": (accelerate_local_sgd, PERIOD_STEPS),
    f"torchft:H={PERIOD_STEPS}": (torchft_local_sgd, PERIOD_STEPS),
    "horovod": (horovod_every_step, 3),
}


def own_address(other: str) -> str:
    """This host's address as `other` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return probe.getsockname()[0]


def main() -> None:
    """A warm-up, in which compute takes no time, then the repetitions one after the other."""
    plan, row = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    emulated = EmulatedModel(plan["model_bytes"], 0.0)
    setup, num_steps = PEERS[row]
    with setup(emulated) as (model, optimizer):
        train(model, optimizer, num_steps)
        emulated.set_compute(plan["compute_s"])
        for _ in range(plan["repetitions"]):
            began_s, seen = time.perf_counter(), interface_bytes()
            train(model, optimizer, num_steps)
            elapsed_s = time.perf_counter() - began_s
            sample = {
                "elapsed_s": elapsed_s,
                "sent_bytes": None,
                "interface_bytes": interface_bytes() - seen,
                "num_steps": num_steps,
            }
            if os.environ.get("RANK", os.environ.get("HOROVOD_RANK")) == "0":
                with open(plan["results"], "a") as results:
                    results.write(json.dumps({"row": row, "samples": [sample]}) + "\n")
                print(f"{row} {elapsed_s / num_steps:.3f} s a step", flush=True)


if __name__ == "__main__":
    main()
