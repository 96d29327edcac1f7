"""All tests, those of the lab beside the others: both spend half of their time waiting for processes to start and end.

The output of the lab's tests comes when both have ended. Ctrl-C reaches both, as they are in the same process group.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest"]


def main() -> int:
    """The first exit status that is not 0."""
    with tempfile.TemporaryFile("w+") as lab_output:
        lab = subprocess.Popen([*PYTEST, "-m", "lab"], stdout=lab_output, stderr=subprocess.STDOUT)
        others = subprocess.Popen([*PYTEST, "-m", "not lab"])
        try:
            statuses = [others.wait(), lab.wait()]
        except KeyboardInterrupt:
            statuses = [others.wait(), lab.wait()]
        lab_output.seek(0)
        print(lab_output.read(), flush=True)
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
