"""From a host that has paceline to hosts that have nothing but a Python with PyTorch: real training over real ssh."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_runs import ALL, run, start, write

from paceline.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(120)]

REPOSITORY = Path(__file__).parents[2]
PYTHON_ON_HOSTS = "~/torch-only/bin/python"
# What `pip install torch numpy scikit-learn` brings; not paceline, typer, rich or safetensors.
PACKAGES = (
    "torch torchgen functorch numpy numpy.libs sympy mpmath networkx jinja2 markupsafe fsspec filelock "
    "typing_extensions.py sklearn scikit_learn.libs scipy scipy.libs joblib cloudpickle threadpoolctl.py narwhals"
)


@pytest.fixture(scope="module")
def torch_only(lab: Lab) -> str:
    """A hostfile: paceline's own interpreter on h1, and on the others one that knows only PyTorch and scikit-learn."""
    [site] = [Path(path) for path in sys.path if path.endswith("site-packages") and (Path(path) / "torch").exists()]
    for host in lab.hosts[1:]:
        made = lab.run(host, [sys.executable, "-m", "venv", "--without-pip", f"{lab.spec.home}/torch-only"])
        assert made.returncode == 0, made.stderr
        [packages] = (lab.home(host) / "torch-only/lib").glob("python3*/site-packages")
        for pattern in PACKAGES.split():
            stem = pattern.removesuffix(".py").removesuffix(".libs")
            for found in [*site.glob(pattern), *site.glob(f"{stem}-*.dist-info")]:
                if not (packages / found.name).is_symlink():
                    (packages / found.name).symlink_to(found)
        check = lab.run(host, [f"{lab.spec.home}/torch-only/bin/python", "-c", "import paceline"])
        assert "No module named 'paceline'" in check.stderr
    hosts = "".join(f"{host} python={PYTHON_ON_HOSTS}\n" for host in lab.hosts[1:])
    write(lab, "h1", "hosts.txt", "h1 slots=1  # the driver's own\n" + hosts)
    return f"{lab.spec.home}/hosts.txt"


@pytest.fixture
def project(lab: Lab) -> Iterator[str]:
    """The examples in h1's home, where no other host sees them."""
    folder = lab.home("h1") / "examples-copy"
    shutil.copytree(REPOSITORY / "examples", folder, ignore=shutil.ignore_patterns("checkpoints", "__pycache__"))
    yield f"{lab.spec.home}/examples-copy"
    shutil.rmtree(folder)


def test_gpt_learns_on_four_hosts(lab: Lab, torch_only: str, project: str) -> None:
    small = ("--batch-size", "4", "--width", "32", "--layers", "1")
    done = run(lab, "--hostfile", torch_only, "gpt.py", *small, "--steps", "12", cwd=project, timeout_s=100)
    assert done.process.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"held_out_loss\D*([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0], done.stdout
    assert "4 ranks on h1, h2, h3, h4" in done.stderr and "samples/s" in done.stderr
    assert (lab.home("h1") / "examples-copy/checkpoints/gpt").is_dir()
    for host in lab.hosts[1:]:
        assert not list(lab.home(host).glob(".local/state/paceline/projects/*/checkpoints"))


def test_digits_with_plain_ddp(lab: Lab, torch_only: str, project: str) -> None:
    done = run(lab, "--hostfile", torch_only, "digits.py", cwd=project, timeout_s=100)
    assert done.process.returncode == 0, done.stderr
    right = [float(share) for share in re.findall(r"\[h1:0\].* ([\d.]+)% of held-out digits right", done.stdout)]
    assert right[-1] > 90, done.stdout


WORLD = """
    import os, pathlib, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(pathlib.Path("data/value.txt").read_text())])
    dist.all_reduce(total)
    print("sum", total.item(), "at", pathlib.Path.cwd().name, os.environ["MASTER_ADDR"], flush=True)
"""


@pytest.fixture
def package(lab: Lab) -> str:
    write(lab, "h1", "shop/data/value.txt", "2.5")
    write(lab, "h1", "shop/pack/__init__.py", "")
    write(lab, "h1", "shop/pack/train.py", WORLD)
    return write(lab, "h1", "shop/run_me.py", "import pack.train")


@pytest.mark.parametrize("what", [("run_me.py",), ("-m", "pack.train"), ("--", "python", "-m", "pack.train")])
def test_scripts_modules_and_commands_with_relative_paths(
    lab: Lab, torch_only: str, package: str, what: tuple[str, ...]
) -> None:
    done = run(lab, "--hostfile", torch_only, *what, cwd=package, timeout_s=100)
    assert done.process.returncode == 0, done.stderr
    assert done.stdout.count("sum 10.0 at shop") == 4, done.stdout
    assert "127.0" not in done.stdout


def test_a_shell_command(lab: Lab, torch_only: str, package: str) -> None:
    command = ["--", "sh", "-c", 'echo "$RANK of $WORLD_SIZE on $(hostname): $(cat data/value.txt)"']
    done = run(lab, "--hostfile", torch_only, *command, cwd=package)
    assert sorted(done.stdout.splitlines()) == [f"[h{n}:{n - 1}] {n - 1} of 4 on h{n}: 2.5" for n in (1, 2, 3, 4)]


def test_only_what_changed_travels(lab: Lab, package: str) -> None:
    write(lab, "h1", "shop/data/other.txt", "1")
    run(lab, "-H", ALL, "--", "true", cwd=package)
    write(lab, "h1", "shop/data/other.txt", "22")
    (lab.home("h1") / "shop/pack/train.py").unlink()
    [copy] = lab.home("h2").glob(".local/state/paceline/projects/shop-????????????-h2")
    (copy / "made-by-the-run.txt").write_text("stays")
    done = run(lab, "-H", ALL, "--", "ls", "-R", cwd=package)
    assert "1 of 4 files sent to h2, h3, h4" in done.stderr
    shown = [line for line in done.stdout.splitlines() if line.startswith("[h2:1]")]
    assert "[h2:1] made-by-the-run.txt" in shown and "[h2:1] train.py" not in shown


def test_a_shared_folder_is_not_copied(lab: Lab) -> None:
    done = run(lab, "-H", ALL, "--", "pwd", cwd=str(REPOSITORY))
    assert {line.split("] ")[1] for line in done.stdout.splitlines()} == {str(REPOSITORY)}
    assert "files sent" not in done.stderr
    assert not list(REPOSITORY.glob(".paceline-token*"))


def test_two_worlds_instead_of_one_fail_loudly(lab: Lab) -> None:
    folder = write(
        lab,
        "h1",
        "spawn/train.py",
        """
        import os, torch.distributed as dist, torch.multiprocessing as mp
        def work(rank, size):
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
            dist.init_process_group("gloo", rank=rank, world_size=size)
            print("trained", flush=True)
        if __name__ == "__main__":
            mp.spawn(work, args=(2,), nprocs=2)
        """,
    )
    done = run(lab, "-H", "h1,h2", "train.py", cwd=folder, timeout_s=60)
    assert done.process.returncode == 1
    assert "trained" not in done.stdout
    # Two hosts, two workers on each: the size alone would not have shown it.
    numbered = r"started this process as rank (\d), but the script joins as rank (?!\1)\d"
    assert re.search(f"{numbered}|ranks are to meet at localhost", done.headline), done.stderr
    alone = run(lab, "-H", "h1", "train.py", cwd=folder, timeout_s=60)
    assert alone.process.returncode == 0 and alone.stdout.count("trained") == 2


def test_workers_whose_failure_nobody_looks_at_do_not_make_a_success(lab: Lab) -> None:
    folder = write(
        lab,
        "h1",
        "process/train.py",
        """
        import os, sys, torch.distributed as dist, torch.multiprocessing as mp
        def work(rank, size):
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29500"
            dist.init_process_group("gloo", rank=rank, world_size=size)
            print("trained", flush=True)
        if __name__ == "__main__":
            mp.set_start_method(sys.argv[1])
            size = int(sys.argv[2])
            workers = [mp.Process(target=work, args=(rank, size)) for rank in range(size)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        """,
    )
    for method, size in (("fork", "3"), ("spawn", "1")):  # a spawned worker imports PyTorch anew
        done = run(lab, "-H", "h1,h2", "train.py", method, size, cwd=folder, timeout_s=60)
        assert done.process.returncode == 1, method
        assert "trained" not in done.stdout
        assert f"a process group of {size} of its own" in done.headline


def test_a_working_folder_that_other_hosts_do_not_have(lab: Lab) -> None:
    folder = write(lab, "h1", "only-here/readme.txt", "")
    script = f"{REPOSITORY}/examples/digits.py"  # a folder that all lab hosts share
    done = run(lab, "-H", "h1,h2", "--dry-run", script, cwd=folder)
    assert done.process.returncode == 0, done.stderr
    assert f"rank 0 on h1, in {folder}\n" in done.stdout and f"rank 1 on h2, in {REPOSITORY}/examples\n" in done.stdout


def test_data_that_git_ignores_is_said_to_stay(lab: Lab) -> None:
    folder = write(lab, "h1", "ignoring/data/train.bin", "x").removesuffix("/data")
    write(lab, "h1", "ignoring/.gitignore", "data/\n")
    write(lab, "h1", "ignoring/train.py", "print('ok')")
    assert lab.run("h1", ["git", "init", "-q", folder]).returncode == 0
    done = run(lab, "-H", "h1,h2", "train.py", cwd=folder)
    assert "not sent    data/: git ignores it; what the script needs of it, put there yourself" in done.stderr


def test_no_secret_on_a_command_line(lab: Lab, package: str) -> None:
    secret = "hush-hush"
    command = ("sh", "-c", 'echo "key $MY_API_KEY"; sleep 4321')
    with start(
        lab, "-H", ALL, "--env", "MY_API_KEY", "--", *command, cwd=package, env={"MY_API_KEY": secret}
    ) as started:
        started.wait_for(f"key {secret}", count=4)
        shown = [process.command for host in lab.hosts for process in lab.processes(host)]
        started.process.terminate()
        started.wait(15)
    assert not [words for words in shown if any(secret in word for word in words)]
    [folder] = [path.parent for path in lab.home("h1").glob(".local/state/paceline/runs/*/rank-0.stdout.log")][-1:]
    assert secret not in (folder / "events.jsonl").read_text()
