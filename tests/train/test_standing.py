"""What a stack says of a rank: each is as PyTorch 2.13 makes it, innermost call first."""

from __future__ import annotations

import sysconfig

import pytest

from paceline.train.standing import BUFFERS, GRADIENTS, SCRIPT, Frame, Standing, find_standing

TORCH = "/venv/lib/python3.11/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
DDP = f"{TORCH}/nn/parallel/distributed.py"
MODULE = Frame(path=f"{TORCH}/nn/modules/module.py", function="_call_impl", line=1)
LOGGER = Frame(path=f"{TORCH}/distributed/c10d_logger.py", function="wrapper", line=83)
STDLIB = sysconfig.get_path("stdlib")
OWN = __import__("paceline").__path__[0]


def call(path: str, function: str, line: int = 7) -> Frame:
    return Frame(path=path, function=function, line=line)


SCRIPTS = [call("/home/u/p/train.py", "train", 41), call("/home/u/p/train.py", "<module>", 60), call("<string>", "x")]


def find(*inner: Frame, text: str = "", busy: bool = False) -> Standing:
    return find_standing([*inner, *SCRIPTS], folder="/home/u/p", text=text, busy=busy)


@pytest.mark.parametrize(
    ("inner", "doing"),
    [
        ([call(C10D, "all_reduce"), LOGGER], "all_reduce"),
        ([call(C10D, "barrier"), LOGGER], "barrier"),
        ([call(C10D, "all_gather"), LOGGER, call(C10D, "all_gather_object"), LOGGER], "all_gather_object"),
        ([call(C10D, "_store_based_barrier"), call(C10D, "init_process_group"), LOGGER], "init_process_group"),
        ([call(f"{TORCH}/distributed/_functional_collectives.py", "wait_tensor")], "wait_tensor"),
        ([call(DDP, "_sync_buffers"), call(DDP, "_pre_forward"), call(DDP, "forward"), MODULE], BUFFERS),
        ([call(f"{TORCH}/distributed/algorithms/join.py", "__exit__")], "join() of uneven inputs"),
        # SyncBatchNorm, and FSDP within a backward pass
        (
            [call(C10D, "all_gather_into_tensor"), call(f"{TORCH}/nn/modules/_functions.py", "forward"), MODULE],
            "all_gather_into_tensor",
        ),
        (
            [call(C10D, "reduce_scatter_tensor"), call(f"{TORCH}/autograd/graph.py", "_engine_run_backward")],
            "reduce_scatter_tensor",
        ),
    ],
)
@pytest.mark.parametrize("busy", [False, True])
def test_a_collective_waits_whatever_the_processor_does(inner: list[Frame], doing: str, busy: bool) -> None:
    found = find(*inner, busy=busy)
    assert (found.doing, found.waits, found.where) == (doing, True, "train.py:41")


@pytest.mark.parametrize(
    ("inner", "doing"),
    [
        (
            [call(f"{TORCH}/autograd/graph.py", "_engine_run_backward"), call(f"{TORCH}/_tensor.py", "backward")],
            GRADIENTS,
        ),
        ([call(DDP, "_pre_forward"), call(DDP, "forward"), MODULE], "forward (gradient buckets)"),
        ([call(DDP, "__init__")], "DistributedDataParallel(...)"),
        ([call(f"{TORCH}/distributed/fsdp/_runtime_utils.py", "_unshard")], "torch.distributed (_unshard)"),
        (
            [call(f"{STDLIB}/threading.py", "wait"), call(f"{OWN}/sync/outer.py", "step_ended")],
            "an exchange between hosts",
        ),
    ],
)
def test_what_may_also_compute_waits_when_it_uses_no_processor(inner: list[Frame], doing: str) -> None:
    assert (find(*inner).doing, find(*inner).waits) == (doing, True)
    assert not find(*inner, busy=True).waits


@pytest.mark.parametrize(
    ("inner", "text", "doing"),
    [
        ([], "time.sleep(1000)", SCRIPT),
        ([call(f"{STDLIB}/threading.py", "wait")], "event.wait()", SCRIPT),
        ([call(f"{TORCH}/utils/data/dataloader.py", "__next__")], "for batch in loader:", "its data loader"),
        ([call(f"{TORCH}/_dynamo/convert_frame.py", "_compile"), MODULE], "", "compilation (torch.compile)"),
        ([call("<frozen importlib._bootstrap>", "_find_and_load"), call(DDP, "__init__")], "", "an import"),
    ],
)
def test_outside_any_collective(inner: list[Frame], text: str, doing: str) -> None:
    found = find(*inner, text=text)
    assert (found.doing, found.waits, found.text) == (doing, False, text)


def test_a_handle_that_is_waited_for() -> None:
    assert find(text="handle.wait()").waits


def test_the_script_is_what_is_of_no_library_or_runs_as_main() -> None:
    packages = "/venv/lib/python3.11/site-packages"
    module = Frame(path=f"{packages}/tool/train.py", function="<module>", line=3, is_main=True)
    found = find_standing([call(C10D, "barrier"), module], folder="/home/u/p", text="", busy=False)
    assert (found.doing, found.where) == ("barrier", "tool/train.py:3")
    deep = find_standing([call(f"{packages}/tool/loop.py", "go"), *SCRIPTS], folder="/elsewhere", text="", busy=False)
    assert deep.where == "/home/u/p/train.py:41"


def test_a_stack_without_the_script() -> None:
    found = find_standing([call(f"{OWN}/train/worker.py", "_leave")], folder="/", text="", busy=False)
    assert found == Standing(doing=SCRIPT, waits=False, where="", text="")


def test_a_long_line_is_cut() -> None:
    assert len(find(text="x" * 500).text) == 80
