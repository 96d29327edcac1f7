"""What `paceline env diff` shows."""

from __future__ import annotations

from made_up_hosts import make_state
from paceline.envs.table import find_differences, render_differences

OLDER = {
    "numpy": "2.3.0",
    "wandb": "0.21",
    "torch": "2.13.0",
    "nvidia-nccl-cu12": "2.27.3",
    "nvidia-cudnn-cu12": "9.10.2.21",
}


def table(*states, width: int = 80) -> list[str]:  # type: ignore[no-untyped-def]
    return list(render_differences([state.name for state in states], find_differences(states), width))


def test_alike() -> None:
    assert find_differences([make_state("alice"), make_state("bob", facts={"python_version": "3.11.2"})]) == []


def test_packages_that_differ_stand_with_what_evens_them_out() -> None:
    bob = make_state("bob")
    object.__setattr__(bob, "details", bob.details.replace(packages=OLDER))
    assert table(make_state("alice"), bob) == [
        "package  alice  bob",
        "wandb    none   0.21",
        "    paceline env sync -H alice --from bob",
        "numpy    2.4.6  2.3.0",
        "    paceline env sync -H bob --from alice",
    ]


def test_another_python_comes_first_and_another_build_of_torch_counts() -> None:
    alice = make_state("alice")
    bob = make_state("bob", facts={"python_version": "3.12.1", "torch_version": "2.13.0+cpu"})
    assert [row.what for row in find_differences([alice, bob])] == ["Python", "torch"]
    assert table(alice, bob)[-2:] == [
        "torch    2.13.0+cu128  2.13.0+cpu",
        "    paceline env sync -H bob --from alice",
    ]


def test_many_hosts_fit_into_the_width() -> None:
    hosts = [make_state(f"a-host-with-a-long-name-{number}") for number in range(6)]
    other = make_state("other", facts={"torch_version": "2.12.1+a.long.local.label"})
    lines = table(*hosts, other)
    assert max(len(line) for line in lines if not line.startswith("    paceline")) <= 80 and "…" in lines[0]
