"""What the hosts say while they start."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time

from paceline.errors import PacelineError
from paceline.lab.spec import LabSpec

_CHUNK_BYTES = 65536


def wait_for_hosts(spec: LabSpec, keeper: subprocess.Popen[bytes], *, timeout_s: float) -> None:
    """Returns when every host has said that it is there. Raises PacelineError with the first trouble."""
    assert keeper.stdout is not None
    deadline = time.monotonic() + timeout_s
    waiting = set(spec.hosts)
    text = b""
    while waiting:
        if not select.select([keeper.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            missing = ", ".join(sorted(waiting))
            raise PacelineError(f"lab {spec.name!r}: nothing from {missing} within {timeout_s:g} s")
        chunk = os.read(keeper.stdout.fileno(), _CHUNK_BYTES)
        if not chunk:
            log = (spec.folder / "keeper.log").read_text(errors="replace").strip()
            raise PacelineError(f"lab {spec.name!r}: its first process ended: {log[-2000:]}")
        *lines, text = (text + chunk).split(b"\n")
        for line in lines:
            record = json.loads(line)
            if "error" in record:
                raise PacelineError(f"lab {spec.name!r}: host {record['host']} did not start: {record['error']}")
            waiting.discard(record["host"])
