"""Differences between hosts that would break a run."""

from __future__ import annotations

import pytest

from paceline.launch.compare import Difference, compare_facts
from paceline.launch.facts import Facts, gather_facts

SAME = Facts(
    hostname="alice",
    python_path="/usr/bin/python3",
    python_version="3.11.7",
    torch_version="2.13.0+cpu",
    cuda_version=None,
    has_safetensors=True,
    gpus=[],
    visible_gpus=None,
    num_cores=8,
    machine="x86_64",
    state_folder="/home/u/.local/state/paceline",
    free_bytes=1 << 40,
    interfaces=[],
)
NAMES = ["alice", "bob", "carol"]
TWO_GPUS = ["NVIDIA A100", "NVIDIA A100"]


def compare(*changes: dict[str, object], slots: int = 1, needs_torch: bool = True) -> list[Difference]:
    facts = [SAME.replace(**change) for change in changes]  # type: ignore[arg-type]
    num_gpus = [len(fact.gpus) for fact in facts]
    return compare_facts(NAMES[: len(facts)], facts, [slots] * len(facts), num_gpus=num_gpus, needs_torch=needs_torch)


@pytest.mark.parametrize(
    "changes",
    [
        [{}],
        [{}, {}],
        [{}, {"python_version": "3.11.2"}],
        [{}, {"torch_version": "2.13.0+cu128", "cuda_version": "12.8"}],
        [{"gpus": TWO_GPUS}, {"gpus": TWO_GPUS}],
        [{"gpus": TWO_GPUS}, {"gpus": ["NVIDIA RTX 3090"]}],
    ],
)
def test_alike_enough(changes: list[dict[str, object]]) -> None:
    assert compare(*changes) == []


@pytest.mark.parametrize(
    ("changes", "slots", "what", "values", "hint"),
    [
        (
            [{}, {"torch_version": "2.12.1"}],
            1,
            "torch",
            ("2.13.0+cpu", "2.12.1"),
            "on bob: python -m pip install torch==2.13.0",
        ),
        (
            [{}, {}, {"torch_version": None, "python_path": "/opt/python"}],
            1,
            "torch",
            ("2.13.0+cpu", "2.13.0+cpu", "none"),
            "on carol: /opt/python -m pip install torch==2.13.0   (or another interpreter: --python PATH)",
        ),
        (
            [{"torch_version": None}, {"torch_version": None}],
            1,
            "torch",
            ("none", "none"),
            "on alice, bob: /usr/bin/python3 -m pip install torch   (or another interpreter: --python PATH)",
        ),
        (
            [{}, {"python_version": "3.12.1"}],
            1,
            "Python",
            ("3.11.7", "3.12.1"),
            "for bob name a Python 3.11: python=PATH in the hostfile",
        ),
        (
            [{"gpus": TWO_GPUS}, {}],
            1,
            "GPUs",
            ("2", "0"),
            "leave out bob, or hide the other hosts' GPUs: --env CUDA_VISIBLE_DEVICES=",
        ),
        (
            [{"gpus": TWO_GPUS}, {"gpus": TWO_GPUS[:1]}],
            2,
            "slots per GPU",
            ("2 on 2", "2 on 1"),
            "there is no free GPU for each rank; ask for at most bob:1",
        ),
    ],
)
def test_each_difference_and_the_line_that_mends_it(
    changes: list[dict[str, object]], slots: int, what: str, values: tuple[str, ...], hint: str
) -> None:
    assert compare(*changes, slots=slots) == [Difference(what=what, values=values, hint=hint)]


def test_a_command_needs_no_torch_but_where_there_is_one_it_must_be_the_same() -> None:
    assert compare({"torch_version": None}, {"torch_version": None}, needs_torch=False) == []
    assert compare({"torch_version": None}, {}, needs_torch=False) == []
    (difference,) = compare({"torch_version": None}, {}, {"torch_version": "2.12.0"}, needs_torch=False)
    assert difference.hint == "on carol: python -m pip install torch==2.13.0"


def test_all_differences_are_told_at_once() -> None:
    found = compare({"gpus": TWO_GPUS}, {"torch_version": "2.12.1", "python_version": "3.12.0"}, slots=1)
    assert [difference.what for difference in found] == ["torch", "Python", "GPUs"]


def test_the_facts_of_this_machine(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    facts = gather_facts()
    assert facts.torch_version is None or facts.torch_version[0].isdigit()
    assert facts.num_cores >= 1 and facts.free_bytes > 0 and facts.interfaces
    assert facts.state_folder == f"{tmp_path}/paceline"
