"""Several real hosts on one Linux machine, for tests, benchmarks and the curious.

Each host has its own network, name, processes, sshd, home, /tmp, /var/tmp, /run, /var/log, /dev/shm and
/etc/hosts; the rest of the file system is the machine's. A virtual switch joins them; links are shaped to the
rate asked for.
"""

from paceline.lab.lab import HostProcess, Lab, names, take_down
from paceline.lab.requirements import Missing, missing
from paceline.lab.spec import LabSpec, format_rate, parse_rate

__all__ = [
    "HostProcess",
    "Lab",
    "LabSpec",
    "Missing",
    "format_rate",
    "missing",
    "names",
    "parse_rate",
    "take_down",
]
