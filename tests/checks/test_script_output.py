"""Rules about what the ranks print, and about files that other hosts may not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_cases import SETUP, Case, confirm, look

from paceline.checks.script import check_script

LOOP = "import torchvision\n" + SETUP + "model = DDP(nn.Linear(1, 1))\nfrom tqdm import tqdm\n"

CASES = [
    Case(
        check="print-on-every-rank",
        bad="""
        for x in loader:
            loss = model(x).sum()
            loss.backward()
            print(loss.item())  #!
            print("done")
        """,
        good="""
        print("before")
        for x in loader:
            loss = model(x).sum()
            loss.backward()
            if dist.get_rank() == 0:
                print(loss.item())
            print(f"[rank {dist.get_rank()}] {loss}")
            if loss.isnan():
                print("no number")
                sys.exit(1)
            if step == profiled:
                print("once")
        for x in evaluation:
            print(x)
        """,
        remedy="if dist.get_rank() == 0: print(loss.item())",
        head=LOOP,
    ),
    Case(
        check="print-on-every-rank",
        bad="""
        def step(x):
            model(x).sum().backward()
        def train():
            for x in loader:
                step(x)
                print(x)  #!
        train()
        """,
        good="""
        import builtins
        def print_on_first(*words): pass
        builtins.print = print_on_first
        def step(x):
            model(x).sum().backward()
        def train():
            for x in loader:
                step(x)
                print(x)
        train()
        """,
        head=LOOP,
    ),
    Case(
        check="progress-bar-on-every-rank",
        bad="for x in tqdm(loader): x.backward()  #!\n",
        good="""
        for x in tqdm(loader, disable=rank != 0): x.backward()
        for x in tqdm(loader) if dist.get_rank() == 0 else loader: x.backward()
        for part in tqdm(download): part.write()
        """,
        remedy="for x in tqdm(loader, disable=dist.get_rank() != 0): x.backward()",
        head=LOOP,
    ),
    Case(
        check="path-outside-project",
        bad="""
        parser.add_argument("--data", default="/data/imagenet")  #!
        parser.parse_args()
        root = "/srv/sets"  #!
        open("../other/words.txt")  #!
        """,
        good="""
        parser.add_argument("--data", default="data/imagenet")
        parser.add_argument("--log", default="/data/log")
        parser.add_argument("--folder", default="/data/mine", help="where to save logs")
        parser.parse_args()
        root = "/path/to/sets"
        route = "/api/v1"
        open("/srv/results.txt", "a")
        torch.save(model, "/srv/model.pt")
        torchvision.datasets.MNIST("../data", download=True)
        torchvision.datasets.MNIST("../data", train=False)
        open("words.txt")
        open(os.path.join(os.path.dirname(__file__), "../words.txt"))
        os.path.join(os.path.dirname(__file__), "../words.txt")
        """,
        remedy='parser.add_argument("--data", default=os.environ.get("DATA", ' + "'/data/imagenet'))",
        head=LOOP,
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_rule(tmp_path: Path, case: Case) -> None:
    confirm(tmp_path, case)


@pytest.mark.parametrize("given", ["root, download=True", "root=root, download=args.fetch", "args.data, download=True"])
def test_a_path_that_is_filled_by_a_download_is_no_matter(tmp_path: Path, given: str) -> None:
    text = (
        'import torchvision\nroot = "../data"\nparser.add_argument("--data", default="../data")\nparser.parse_args()\n'
    )
    call = f"torchvision.datasets.MNIST({given})\n"
    assert look(tmp_path, text + call) == []
    told = look(tmp_path, text + call.partition(", download")[0] + ", download=False)\n")
    assert {one.check for one in told} == {"path-outside-project"}


def test_bars_are_counted(tmp_path: Path) -> None:
    bars = "for x in tqdm(loader): x.backward()\n" * 3 + "for x in tqdm(loader): x.backward()  # paceline: ignore\n"
    assert [one.text for one in look(tmp_path, LOOP + bars)] == ["every rank shows this bar, and 2 more in this file"]


def test_a_script_of_one_process_may_print(tmp_path: Path) -> None:
    text = "import torch\nfrom tqdm import tqdm\nfor x in tqdm(loader):\n    x.backward()\n    print(x)\n"
    assert {one.check for one in look(tmp_path, text)} == {"no-process-group"}


def test_a_path_is_outside_by_where_it_leads(tmp_path: Path) -> None:
    """From a folder of the project, `../data` may still lie in it."""
    script = tmp_path / "mnist" / "main.py"
    script.parent.mkdir()
    script.write_text('open("../data/train.txt")\n')
    assert check_script(script, tmp_path) == []
    assert [one.check for one in check_script(script, tmp_path / "mnist")] == ["path-outside-project"]
