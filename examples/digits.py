"""Handwritten digits with plain DistributedDataParallel: what anyone's torchrun script looks like.

Nothing of paceline's is in it, and it runs under `paceline run` as it is:

    paceline run -H localhost:2 examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    train, held_out = order[300:], order[:300]

    dataset = TensorDataset(pixels[train], labels[train])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                right = (model.module(pixels[held_out]).argmax(dim=1) == labels[held_out]).float().mean()
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, {right.item():.1%} of held-out digits right",
                flush=True,
            )

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
