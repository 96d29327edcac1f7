"""How many GPUs a run may use on a host: what the machine has, what is hidden, and by whom."""

from __future__ import annotations

import pytest

from paceline.launch.gpus import count_gpus

FOUR = ["NVIDIA A100"] * 4
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("asked", "there", "gpus", "expected"),
    [
        ({}, None, None, (4, "4 found")),
        ({}, "0", None, (1, "CUDA_VISIBLE_DEVICES='0'")),
        ({}, "2, 3", None, (2, "CUDA_VISIBLE_DEVICES='2, 3'")),
        ({}, "", None, (0, "CUDA_VISIBLE_DEVICES=''")),
        ({}, "-1", None, (0, "CUDA_VISIBLE_DEVICES='-1'")),
        ({}, "0,7,1", None, (1, "CUDA_VISIBLE_DEVICES='0,7,1'")),
        ({}, "GPU-8932f937,MIG-1", None, (2, "CUDA_VISIBLE_DEVICES='GPU-8932f937,MIG-1'")),
        ({VISIBLE: ""}, "0,1", None, (0, "CUDA_VISIBLE_DEVICES=''")),
        ({VISIBLE: "1"}, None, (0, 2), (2, "gpus=0,2")),
        ({}, "0", (0, 9), (1, "gpus=0,9")),
    ],
)
def test_count(
    asked: dict[str, str], there: str | None, gpus: tuple[int, ...] | None, expected: tuple[int, str]
) -> None:
    assert count_gpus(FOUR, asked=asked, there=there, gpus=gpus) == expected


def test_a_machine_without_any() -> None:
    assert count_gpus([], asked={}, there="0", gpus=None)[0] == 0
