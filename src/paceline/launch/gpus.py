"""How many GPUs of a host a run may use, and why. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def count_gpus(
    models: Sequence[str], *, asked: Mapping[str, str], there: str | None, gpus: tuple[int, ...] | None
) -> tuple[int, str]:
    """The number of GPUs that the ranks will see, and the reason.

    `models`: all that the machine has. `asked`: the ranks' variables, from --env and the hostfile. `there`:
    CUDA_VISIBLE_DEVICES as the host itself has it. `gpus`: from the hostfile, goes before the variable.
    """
    if gpus is not None:
        return sum(index < len(models) for index in gpus), f"gpus={','.join(map(str, gpus))}"
    visible = asked.get("CUDA_VISIBLE_DEVICES", there)
    if visible is None:
        return len(models), f"{len(models)} found"
    reason = f"CUDA_VISIBLE_DEVICES={visible!r}"
    count = 0
    for word in visible.split(","):
        word = word.strip()
        if (word.isdigit() and int(word) < len(models)) or (word.startswith(("GPU-", "MIG-")) and models):
            count += 1
        else:
            break  # CUDA sees none of those that follow one which isn't there
    return count, reason
