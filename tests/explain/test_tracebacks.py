"""Tracebacks in logs: the exception and the place in the user's own code, through prefixes, chains and neighbours."""

from __future__ import annotations

import pytest
from explaining import read

from paceline.explain.tracebacks import Crash

OWN = '  File "/home/alice/train.py", line 42, in step\n    loss = f(x)\n'
LIBRARY = '  File "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1, in forward\n    y\n'
HEADER = "Traceback (most recent call last):\n"


def only_crash(text: str) -> Crash:
    (crash,) = read(text).crashes
    return crash


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "[default1]:[rank3]: ", "[1,3]<stderr>:", "[alice:3] "])
def test_exception_and_own_last_frame(prefix: str) -> None:
    crash = only_crash(prefixed(prefix, f"{HEADER}{OWN}{LIBRARY}ValueError: bad label\n"))
    assert crash.line.text == "ValueError: bad label" and crash.line.number == 6
    assert str(crash.frame) == "/home/alice/train.py, line 42, in step"
    assert not crash.is_raised_by_own
    assert crash.line.rank == (3 if prefix else None)


def test_raised_by_the_users_own_code() -> None:
    assert only_crash(f"{HEADER}{LIBRARY}{OWN}ValueError: bad label").is_raised_by_own


@pytest.mark.parametrize(
    "path",
    [
        "/usr/lib/python3.12/runpy.py",
        "/opt/venv/lib/python3.12/site-packages/torch/x.py",
        "/usr/lib/python3/dist-packages/x.py",
        "<frozen runpy>",
        "/opt/pytorch/torch/nn/x.py",
        "/home/alice/.local/state/paceline/runtime/0a1b/paceline/train/worker.py",
        "/opt/venv/bin/torchrun",
    ],
)
def test_what_users_have_not_written(path: str) -> None:
    crash = only_crash(f'{HEADER}  File "{path}", line 1, in f\nValueError: x\n')
    assert crash.frame is None and str(crash.last_frame) == f"{path}, line 1, in f"


def test_code_in_a_frame_is_no_message() -> None:
    log = read(f'{HEADER}{OWN}    raise RuntimeError("CUDA out of memory. Tried to allocate")\nValueError: x\n')
    assert not log.hits


def test_the_messages_further_lines_count() -> None:
    crash = only_crash(
        f"{HEADER}{OWN}torch.distributed.DistBackendError: NCCL error\nLast error:\nDuplicate GPU detected : rank 1\n"
    )
    assert crash.signature is not None and crash.signature.id == "nccl-duplicate-gpu"
    assert crash.last_number == 6


def test_the_message_ends_where_another_speaks() -> None:
    stamped = "W1130 12:00:02.1 43 torch/api.py:897] Sending process 4400 closing signal SIGTERM"
    crash = only_crash(f"{HEADER}{OWN}ValueError: x\n{stamped}\n")
    assert crash.signature is None and crash.last_number == 4


@pytest.mark.parametrize("link", ["During handling of the above exception, another exception occurred:", ""])
def test_chains(link: str) -> None:
    text = f"{HEADER}{OWN}KeyError: 'lr'\n\n{link}\n\n{HEADER}{OWN}ValueError: no lr\n"
    crashes = read(text).crashes
    assert len(crashes) == (1 if link else 2)
    assert crashes[-1].cause.line.text == "ValueError: no lr"
    assert (crashes[-1].before is not None) == bool(link)


def test_a_chain_that_began_with_something_known_is_that() -> None:
    link = "The above exception was the direct cause of the following exception:"
    text = (
        f"{HEADER}{LIBRARY}RuntimeError: Connection closed by peer [::1]\n\n{link}\n\n{HEADER}{OWN}OSError: gave up\n"
    )
    cause = only_crash(text).cause
    assert cause.signature is not None and cause.signature.id == "gloo-closed-by-peer"


def test_the_message_ends_where_another_exception_is_printed() -> None:
    """Ranks that share a file print right behind each other."""
    crash = only_crash(f"{HEADER}{OWN}ValueError: x\nRuntimeError: Connection closed by peer [::1]:7\n")
    assert crash.signature is None
    nccl = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
    crash = only_crash(f"{HEADER}{OWN}torch.distributed.DistBackendError: NCCL error in: x\n{nccl}\n")
    assert crash.signature is not None and crash.signature.id == "nccl-remote-error"


def test_chains_of_ranks_that_print_at_once() -> None:
    """PyTorch leaves the prefix away from empty lines."""
    link = "During handling of the above exception, another exception occurred:"
    first = prefixed("[rank0]: ", f"{HEADER}{OWN}KeyError: 'lr'\n")
    rest = prefixed("[rank0]: ", link) + "\n" + prefixed("[rank0]: ", f"{HEADER}{OWN}ValueError: no lr\n")
    other = prefixed("[rank1]: ", f"{HEADER}{OWN}TypeError: x\n")
    crashes = read(first + "\n" + other + rest).crashes
    assert [(one.line.text, one.line.rank, one.before is not None) for one in crashes] == [
        ("TypeError: x", 1, False),
        ("ValueError: no lr", 0, True),
    ]


def test_tracebacks_of_ranks_between_each_other() -> None:
    texts = [prefixed(f"[rank{rank}]: ", f"{HEADER}{OWN}ValueError: {rank}\n").splitlines() for rank in (0, 1)]
    mixed = "\n".join(line for pair in zip(*texts, strict=True) for line in pair)
    assert {(crash.line.rank, crash.line.text) for crash in read(mixed).crashes} == {
        (0, "ValueError: 0"),
        (1, "ValueError: 1"),
    }


def test_a_workers_own_traceback_counts_not_the_one_around_it() -> None:
    inner = '  File "/home/alice/data.py", line 7, in __getitem__\n    x\n'
    text = (
        f"{HEADER}{OWN}{LIBRARY}ValueError: Caught ValueError in DataLoader worker process 0.\n"
        f"Original {HEADER}{LIBRARY}{inner}ValueError: no such file\n"
    )
    crash = only_crash(text)
    assert crash.line.text == "ValueError: no such file" and str(crash.frame).startswith("/home/alice/data.py")


def test_the_traceback_in_torchruns_summary() -> None:
    text = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_12:00:06
  host      : node2
  rank      : 4 (local_rank: 0)
  exitcode  : 1 (pid: 4400)
  error_file: /tmp/error.json
  traceback : Traceback (most recent call last):
    File "/home/alice/train.py", line 8, in main
      raise ValueError("no such label: 12")
  ValueError: no such label: 12

"""
    crash = only_crash(text)
    assert (crash.line.text, crash.line.rank, crash.line.host) == ("ValueError: no such label: 12", 4, "node2")
    assert str(crash.frame) == "/home/alice/train.py, line 8, in main"


def test_a_traceback_that_never_ends_is_given_up() -> None:
    log = read(HEADER + "  x\n" * 5000 + "CUDA out of memory. Tried to allocate 1 GiB\n")
    assert not log.crashes and [hit.first.number for hit in log.hits] == [5002]
