"""Are the hosts alike enough to train together? Pure: facts in, differences out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.launch.facts import Facts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that would break the run: what each host has, and the line that mends it."""

    what: str
    values: tuple[str, ...]
    """One per host, in order."""
    hint: str


def compare_facts(
    names: Sequence[str], facts: Sequence[Facts], slots: Sequence[int], *, num_gpus: Sequence[int], needs_torch: bool
) -> list[Difference]:
    """All differences that stop a run. `slots`: the ranks that each host is to run; `num_gpus`: that they will see."""
    found: list[Difference] = []
    torch_versions = [fact.torch_version for fact in facts]
    reference = next((version for version in torch_versions if version), None)
    if needs_torch and None in torch_versions:
        lacking = ", ".join(name for name, version in zip(names, torch_versions, strict=True) if not version)
        python = facts[torch_versions.index(None)].python_path
        wanted = f"torch=={_public_version(reference)}" if reference else "torch"
        found.append(
            Difference(
                what="torch",
                values=tuple(version or "none" for version in torch_versions),
                hint=f"on {lacking}: {python} -m pip install {wanted}   (or another interpreter: --python PATH)",
            )
        )
    elif len({_public_version(version) for version in torch_versions if version}) > 1:
        # A host without torch, which only a command that needs none comes to, is not one with another torch.
        others = _others(names, [_public_version(version or reference) for version in torch_versions])
        found.append(
            Difference(
                what="torch",
                values=tuple(version or "none" for version in torch_versions),
                hint=f"on {others}: python -m pip install torch=={_public_version(reference)}",
            )
        )
    minors = [".".join(fact.python_version.split(".")[:2]) for fact in facts]
    if len(set(minors)) > 1:
        found.append(
            Difference(
                what="Python",
                values=tuple(fact.python_version for fact in facts),
                hint=f"for {_others(names, minors)} name a Python {minors[0]}: python=PATH in the hostfile",
            )
        )
    found += _gpu_differences(names, num_gpus, slots)
    return found


def _gpu_differences(names: Sequence[str], counts: Sequence[int], slots: Sequence[int]) -> list[Difference]:
    found: list[Difference] = []
    if any(counts) and not all(counts):
        lacking = ", ".join(name for name, count in zip(names, counts, strict=True) if not count)
        found.append(
            Difference(
                what="GPUs",
                values=tuple(str(count) for count in counts),
                hint=f"leave out {lacking}, or hide the other hosts' GPUs: --env CUDA_VISIBLE_DEVICES=",
            )
        )
    short = [index for index, count in enumerate(counts) if count and slots[index] > count]
    if short:
        asked = ", ".join(f"{names[i]}:{counts[i]}" for i in short)
        found.append(
            Difference(
                what="slots per GPU",
                values=tuple(f"{slot} on {count}" for slot, count in zip(slots, counts, strict=True)),
                hint=f"there is no free GPU for each rank; ask for at most {asked}",
            )
        )
    return found


def _public_version(version: str | None) -> str | None:
    """2.13.0+cpu -> 2.13.0: builds of one version for other hardware talk to each other."""
    return version.split("+")[0] if version else None


def _others(names: Sequence[str], values: Sequence[str | None]) -> str:
    """The hosts whose value is not that of the first one."""
    return ", ".join(name for name, value in zip(names, values, strict=True) if value != values[0])
