"""Train a small byte-level GPT on the text of Python's own documentation, which every Python ships.

    paceline run -H localhost:2 examples/gpt.py    two workers on this machine
    paceline run -H alice,bob examples/gpt.py      two machines
    paceline run -H alice,bob --sync diloco:H=30 examples/gpt.py      ... that exchange weights every 30 steps
    python examples/gpt.py --steps 50              alone, as any script

What makes it train on several machines are the lines with `run.` in them; the rest is plain PyTorch.
"""

import argparse
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import paceline

CONTEXT = 128  # bytes that the model looks back on


class Text(Dataset):
    """Windows of CONTEXT + 1 bytes, one after the other: what the model reads, and one byte more to
    predict."""

    def __init__(self, text: bytes) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.bytes[index * CONTEXT : (index + 1) * CONTEXT + 1]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: batch, time, width
        batch, time, width = x.shape
        split = self.queries_keys_values(self.before_attention(x)).view(batch, time, 3, self.heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The mean loss, in nats per byte, of predicting text[:, 1:] from what stands before. text: batch,
        time + 1."""
        x = self.byte(text[:, :-1]) + self.place.weight[: text.shape[1] - 1]
        scores = self.head(self.last(self.blocks(x)))
        return functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


@torch.no_grad()
def evaluate(run: paceline.Run, model: nn.Module, held_out: paceline.Batches, *, step: int) -> None:
    """Logs the loss on the held-out text; each rank evaluates its part, weighted with its number of
    samples."""
    model.eval()
    total, samples = 0.0, 0
    for text in held_out:
        with run.autocast():
            total += model(text).item() * len(text)
        samples += len(text)
    model.train()
    run.log(step=step, weight=samples, held_out_loss=total / samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="stop after this many steps, wherever the epoch stands")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of 128 bytes per worker")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--checkpoint-dir", default="checkpoints/gpt")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    args = parser.parse_args()

    run = paceline.init(precision=args.precision)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    cut = len(text) * 19 // 20
    batches = run.batches(Text(text[:cut]), args.batch_size)
    held_out = run.batches(Text(text[cut:]), args.batch_size, shuffle=False)

    model = GPT(width=args.width, layers=args.layers, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = run.prepare(model, optimizer)

    step = 0
    # A run that its launcher started again (paceline run --restarts) continues too.
    if (args.resume or run.attempt > 0) and (resumed := run.resume(args.checkpoint_dir)):
        step = resumed.step
    evaluate(run, model, held_out, step=step)

    while batches.epoch < args.epochs and (args.steps is None or step < args.steps):
        for text in batches:
            with run.autocast():
                loss = model(text)
            run.backward(loss)
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 20 == 0:
                run.log(step=step, loss=loss)
            if step % args.checkpoint_every == 0:
                run.checkpoint(args.checkpoint_dir, step=step)
            if step == args.steps:
                break
    run.synchronize()  # with --sync, hosts may have learned something since they last exchanged weights
    run.checkpoint(args.checkpoint_dir, step=step)
    evaluate(run, model, held_out, step=step)


if __name__ == "__main__":
    main()
