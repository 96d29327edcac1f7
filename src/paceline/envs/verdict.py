"""Whether a host can have the environment. Pure."""

from __future__ import annotations

from paceline.envs.inventory import Inventory
from paceline.envs.lock import Lock
from paceline.envs.looking import Look
from paceline.launch.facts import Facts
from paceline.units import format_bytes

_MARGIN_BYTES = 64 << 20


def judge_host(facts: Facts, look: Look, inventory: Inventory, lock: Lock) -> tuple[str, str] | None:
    """(why this host can't have it, what to do about it); None where it can."""
    minor = ".".join(facts.python_version.split(".")[:2])
    if facts.machine != inventory.machine:
        text = f"its processor is {facts.machine}, but the packages were built for {inventory.machine}"
        return text, "make an environment there by hand, with the same versions: paceline env diff compares them"
    if minor != inventory.python and not lock.is_packed:
        text = f"Python {minor} at {facts.python_path}, but the packages belong to Python {inventory.python}"
        return (
            text,
            f"install Python {inventory.python} there (uv python install {inventory.python}), and name it: "
            + ("python=PATH in the hostfile"),
        )
    if look.libc != inventory.libc:
        text = f"its C library is {look.libc or 'not glibc'}, the source's {inventory.libc or 'not glibc'}"
        return text, "make an environment there by hand: wheels are built for one C library"
    if look.state == "foreign":
        return f"{look.folder} is there, and was not made by paceline", "--to another folder, or remove that one"
    needed = lock.num_bytes - look.arrived_bytes + _MARGIN_BYTES
    room = [(facts.free_bytes, facts.state_folder), *([(look.free_bytes, look.folder)] if look.is_apart else [])]
    for free_bytes, folder in room:
        if free_bytes < needed:
            text = f"{format_bytes(free_bytes)} free for {folder}, but it needs {format_bytes(needed)}"
            return text, "make room there, or set XDG_STATE_HOME there to a folder on another disk"
    return None
