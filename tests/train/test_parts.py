"""What a rank keeps for itself is read back as it was written, or refused with the reason."""

from __future__ import annotations

import pathlib

import pytest
import torch

from paceline import CheckpointError
from paceline.train import parts
from paceline.train.batches import Counts, rank_share

OWN = {"steps": 3, "weights": torch.arange(6.0).reshape(2, 3).t(), "by_name": {0: [torch.tensor(1), None]}}


def test_a_part_comes_back_as_it_went(tmp_path: pathlib.Path) -> None:
    sha256 = parts.write(tmp_path, "t", "000001-step-5", 3, OWN)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["rank-3.safetensors"]
    found = parts.read(tmp_path, "t", "000001-step-5", 3, sha256)
    assert repr(found) == repr(OWN) and found["weights"].dtype == torch.float32
    assert parts.write(tmp_path, "t", "000002-step-5", 3, OWN) == sha256


def test_a_part_without_tensors_is_one_too(tmp_path: pathlib.Path) -> None:
    sha256 = parts.write(tmp_path, "t", "n", 0, {"steps": 3})
    assert parts.read(tmp_path, "t", "n", 0, sha256) == {"steps": 3}


def test_a_part_that_is_another_or_gone_is_refused(tmp_path: pathlib.Path) -> None:
    sha256 = parts.write(tmp_path, "t", "n", 0, OWN)
    path = tmp_path / "parts" / "t" / "n" / "rank-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors has other content than was written"):
        parts.read(tmp_path, "t", "n", 0, sha256)
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors: No such file or directory"):
        parts.read(tmp_path, "t", "n", 1, sha256)


def test_parts_whose_checkpoint_is_gone_go_too(tmp_path: pathlib.Path) -> None:
    for training, name in (("ours", "1"), ("ours", "2"), ("ours", "3"), ("other", "1")):
        parts.write(tmp_path, training, name, 0, {"steps": 1})
    parts.remove_others(tmp_path, "ours", ["2", "3"])
    left = sorted("/".join(path.parts[-3:-1]) for path in tmp_path.rglob("*.safetensors"))
    assert left == ["other/1", "ours/2", "ours/3"]
    parts.remove_others(tmp_path, "nobody's", [])


def test_a_disk_that_refuses_is_one_clear_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "parts").write_text("")
    with pytest.raises(CheckpointError, match="no checkpoint could be written into"):
        parts.write(tmp_path, "t", "n", 0, OWN)


@pytest.mark.parametrize("total", [6, 7, 11, 16])
def test_weighted_losses_give_each_sample_the_same_say(total: int) -> None:
    """Over the ranks of one host of two, and over all: the plain mean of weighted means is the mean over samples."""
    values = torch.arange(float(total))
    for ranks in ([0, 1, 2], [3, 4], [0, 1, 2, 3, 4]):
        shares = [values[rank_share(total, rank, 5)] for rank in ranks]
        weights = [Counts(local=len(share), total=total).weight(ranks, 5) for share in shares]
        mean = sum(share.mean() * weight for share, weight in zip(shares, weights, strict=True)) / len(ranks)
        assert torch.isclose(torch.as_tensor(mean), torch.cat(shares).mean())
