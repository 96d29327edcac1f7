"""What can be wrong with the GPUs of a host, as far as files tell. Pure: a state in, results out."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.checks.findings import check
from paceline.checks.host_states import HostState
from paceline.checks.results import Result, failure, ok, skipped, warning

# The oldest driver that runs a CUDA of this major version, on Linux: within a major version newer minors run as well.
_OLDEST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 0, 0)}
# What the driver's errors mean to whoever has the machine; others are told with their number.
_XID_MEANINGS = {
    "13": "a kernel accessed memory that isn't its own: a bug in the script or a library",
    "31": "a kernel accessed memory that isn't its own: a bug in the script or a library",
    "43": "a program's work was stopped; the card itself is fine",
    "45": "a program was ended; the card itself is fine",
    "48": "an error in the card's memory that could not be corrected",
    "63": "a row of the card's memory was replaced; reset it soon",
    "64": "a row of the card's memory could not be replaced",
    "74": "an error of NVLink",
    "79": "the card has fallen off the bus: power, temperature or the slot",
    "94": "an error in the card's memory, contained to one program",
    "95": "an error in the card's memory that reached other programs",
    "119": "the card's own processor does not answer",
    "120": "the card's own processor has failed",
}
_HARMLESS_XIDS = {"13", "31", "43", "45"}


@check("gpu-driver")
def check_gpu_driver(state: HostState) -> Iterator[Result]:
    """NVIDIA's driver is loaded, and of one piece.

    What it looks at
        Cards on the bus, the version of the kernel's module, that of libcuda on the disk, and the files /dev/nvidia*.

    Why it matters
        After an update without a reboot, module and library differ, and every CUDA program ends with "Driver/library
        version mismatch". In a container that was started without its GPUs, the files are missing.

    How to mend it
        Reboot the host; load the module; start the container with `--gpus all`.
    """
    gpu, in_container = state.details.gpu, state.details.container not in ("", "wsl")
    if not gpu["cards"] and not gpu["driver"]:
        yield ok("no NVIDIA card")
    elif not gpu["driver"]:
        remedy = f"On {state.name}:  modprobe nvidia || apt install nvidia-driver-580   (as root)"
        yield warning(f"{_cards(gpu['cards'])} there, but the driver is not loaded", remedy)
    elif not gpu["devices"]:
        text = f"driver {gpu['driver']} is loaded, but there is no /dev/nvidia0"
        if in_container:
            yield warning(text, "docker run --gpus all ...   (with nvidia-container-toolkit)")
        else:
            yield warning(text, f"On {state.name}:  nvidia-modprobe -u -c 0   (as root)")
    elif gpu["libcuda"] and gpu["driver"] not in gpu["libcuda"] and state.num_gpus:
        text = f"the kernel has driver {gpu['driver']}, but libcuda is {', '.join(gpu['libcuda'])}"
        yield failure(text, f"On {state.name}:  reboot   (the driver was updated since the last boot)")
    else:
        yield ok(f"driver {gpu['driver']} for {_cards(len(gpu['devices']))}")


def _cards(count: int) -> str:
    return f"{count} NVIDIA card{'' if count == 1 else 's'}"


@check("gpu-torch")
def check_gpu_torch(state: HostState) -> Iterator[Result]:
    """PyTorch's CUDA and the driver fit together.

    What it looks at
        The CUDA that PyTorch was built for, and the oldest driver that can run it.

    Why it matters
        With an older driver every call ends with "CUDA driver version is insufficient" (error 35) or 803; a build for
        CPUs leaves the cards idle.

    How to mend it
        A newer driver, or a PyTorch for an older CUDA: see the selector on pytorch.org.
    """
    driver, cuda, python = state.details.gpu["driver"], state.details.torch_cuda, state.facts.python_path
    if not state.num_gpus or state.details.torch_version is None:
        yield ok("no GPU to fit to")
        return
    if cuda is None:
        text = f"{_cards(len(state.facts.gpus))}, but torch {state.details.torch_version} is built without CUDA"
        yield warning(text, f"{python} -m pip install --force-reinstall torch   (on Linux the default has CUDA)")
        return
    needed = _OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    if driver is None or needed is None:
        yield skipped(f"nothing is known of CUDA {cuda} and driver {driver}")
    elif _numbers(driver) < needed:
        oldest = ".".join(map(str, needed))
        yield failure(
            f"torch is built for CUDA {cuda}, which needs driver {oldest} or newer; here it is {driver}",
            f"On {state.name}:  update the driver, or install a torch for an older CUDA (pytorch.org)",
        )
    else:
        yield ok(f"driver {driver} runs CUDA {cuda}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in version.split(".") if word.isdigit())


@check("gpu-visible")
def check_gpu_visible(state: HostState) -> Iterator[Result]:
    """All cards can be used.

    What it looks at
        CUDA_VISIBLE_DEVICES as the host itself has it, against the cards that are there.

    Why it matters
        A line in a shell's profile hides cards from every run, which then starts fewer ranks than the host could take.

    How to mend it
        Remove the line, or give the ranks their own: `--env CUDA_VISIBLE_DEVICES=0,1`, `gpus=` in the hostfile.
    """
    there, visible = len(state.facts.gpus), state.facts.visible_gpus
    if visible is not None and state.num_gpus < there:
        yield warning(
            f"{state.num_gpus} of {_cards(there)} can be used: CUDA_VISIBLE_DEVICES={visible!r} is set there",
            f"On {state.name}:  grep -n CUDA_VISIBLE_DEVICES ~/.bashrc ~/.profile /etc/environment",
        )
    else:
        yield ok(f"{state.num_gpus} of {_cards(there)} to be used" if there else "no NVIDIA card")


@check("gpu-nccl")
def check_gpu_nccl(state: HostState) -> Iterator[Result]:
    """One NCCL, the one that PyTorch came with.

    What it looks at
        Installed packages nvidia-nccl-cu*, and libnccl.so.2 in the folders of LD_LIBRARY_PATH.

    Why it matters
        Two packages write the same file, and whichever came last wins: "undefined symbol: ncclCommResume". A library on
        LD_LIBRARY_PATH comes before PyTorch's own, and then "Mismatched NCCL version" between hosts.

    How to mend it
        Remove the one that does not belong to PyTorch's CUDA, and install the other again; clear LD_LIBRARY_PATH.
    """
    details, python = state.details, state.facts.python_path
    if not state.num_gpus:
        yield ok("no GPU, so no NCCL")
        return
    wheels = [name for name in details.packages if name.startswith("nvidia-nccl-cu")]
    major = (details.torch_cuda or "").split(".")[0]
    if len(wheels) > 1:
        kept = next((name for name in wheels if name.endswith(f"cu{major}")), wheels[0])
        others = " ".join(name for name in wheels if name != kept)
        again = f"{python} -m pip install --force-reinstall --no-deps {kept}=={details.packages[kept]}"
        yield failure(
            f"{' and '.join(wheels)} are both installed, and write the same file",
            f"{python} -m pip uninstall -y {others} && {again}",
        )
    folders = [folder.rstrip("/") for folder in details.variables.get("LD_LIBRARY_PATH", "").split(":") if folder]
    ahead = [path for path in details.nccl_libraries if path.rpartition("/")[0] in folders]
    if ahead:
        yield warning(
            f"LD_LIBRARY_PATH puts {ahead[0]} before the NCCL that torch came with",
            "paceline run --env LD_LIBRARY_PATH= ...   (or remove the folder where it is set)",
        )
    if len(wheels) <= 1 and not ahead:
        yield ok(f"{wheels[0]} {details.packages[wheels[0]]}" if wheels else "the NCCL that is built into torch")


@check("gpu-errors")
def check_gpu_errors(state: HostState) -> Iterator[Result]:
    """Errors that the driver has noted.

    What it looks at
        Lines "NVRM: Xid" in the kernel's log since the boot, where it may be read.

    Why it matters
        A card that has fallen off the bus, or whose memory has errors, takes part until the first collective, and then
        everybody waits for it.

    How to mend it
        It depends on the number; NVIDIA's "XID Errors" page has them all. Often: reboot; then let the card be tested.
    """
    errors = state.details.gpu["errors"]
    if not state.facts.gpus:
        yield ok("no NVIDIA card")
        return
    if errors is None:
        yield skipped("the kernel's log may be read by root only")
        return
    numbers = [line.partition("): ")[2].partition(",")[0].strip() for line in errors]
    serious = [number for number in numbers if number not in _HARMLESS_XIDS]
    if serious:
        meaning = _XID_MEANINGS.get(serious[-1], "see NVIDIA's page of XID errors")
        text = f"the driver has noted error Xid {serious[-1]} ({meaning})"
        yield warning(text, f"On {state.name}:  dmesg | grep Xid; nvidia-smi -q -d ECC,TEMPERATURE   (as root)")
    else:
        yield ok("no error of a card since the boot")


GPU_CHECKS = (check_gpu_driver, check_gpu_torch, check_gpu_visible, check_gpu_nccl, check_gpu_errors)
