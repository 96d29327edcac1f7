"""Rules about who writes checkpoints, and where they are read to."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_cases import IMPORTS, SETUP, Case, confirm, look

CASES = [
    Case(
        check="save-on-every-rank",
        bad='torch.save(model.state_dict(), "model.pt")  #!\n',
        good="""
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "model.pt")
        """,
        remedy="if dist.get_rank() == 0: torch.save(model.state_dict(), 'model.pt')",
    ),
    Case(
        check="save-on-every-rank",
        bad="""
        def save(path):
            torch.save(model.state_dict(), path)  #!
        save("model.pt")
        """,
        good="""
        def save(path):
            torch.save(model.state_dict(), path)
        def finish():
            if dist.get_rank() != 0:
                return
            save("model.pt")
        finish()
        """,
    ),
    Case(
        check="save-on-every-rank",
        bad='model.save_pretrained("out")  #!\n',
        good="""
        import io
        torch.save(model.state_dict(), f"model-{dist.get_rank()}.pt")
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        model.save_pretrained("out", is_main_process=is_main)
        class Cached(torch.utils.data.Dataset):
            def __getitem__(self, index):
                torch.save(self.make(index), f"{index}.pt")
        Cached()[0]
        """,
    ),
    Case(
        check="save-on-every-rank",
        bad="""
        class Saver:
            def save(self):
                torch.save(model, "model.pt")  #!
        saver = Saver()
        saver.save()
        """,
        good="""
        class Saver:
            def save(self):
                torch.save(model, "model.pt")
        class NoSaver:
            def save(self): pass
        saver = Saver() if dist.get_rank() == 0 else NoSaver()
        if dist.get_rank() == 0:
            saver = Saver()
        else:
            saver = NoSaver()
        saver.save()
        """,
    ),
    Case(
        check="save-on-every-rank",
        bad="if args.save:\n    torch.save(model, 'model.pt')  #!\n",
        good="if self.save_here:\n    torch.save(model, 'model.pt')\n",
    ),
    Case(
        check="save-on-each-host",
        bad="""
        local_rank = int(os.environ["LOCAL_RANK"])
        if epoch % 5 == 0 and local_rank == 0:  #!
            torch.save(model.state_dict(), "model.pt")
        """,
        good="""
        rank = int(os.environ["RANK"])
        if epoch % 5 == 0 and rank == 0:
            torch.save(model.state_dict(), "model.pt")
        """,
        remedy="if epoch % 5 == 0 and dist.get_rank() == 0:",
    ),
    Case(
        check="save-on-each-host",
        bad="""
        gpu_id = int(os.environ["LOCAL_RANK"])
        class Trainer:
            def __init__(self, gpu_id):
                self.gpu_id = gpu_id
            def save(self):
                torch.save(self.model.state_dict(), "model.pt")
            def train(self):
                if self.gpu_id == 0:  #!
                    self.save()
        Trainer(gpu_id).train()
        """,
        good="""
        class Trainer:
            def __init__(self, gpu_id):
                self.gpu_id = gpu_id
            def save(self):
                torch.save(self.model.state_dict(), f"model-{self.gpu_id}.pt")
            def train(self):
                if self.gpu_id == 0:
                    self.save()
        Trainer(int(os.environ["LOCAL_RANK"])).train()
        """,
    ),
    Case(
        check="load-without-map-location",
        bad='checkpoint = torch.load("model.pt")  #!\n',
        good="""
        checkpoint = torch.load("model.pt", map_location="cpu")
        images = torch.load("images.bin")
        own = torch.load(f"model-{dist.get_rank()}.pt")
        if dist.get_rank() == 0:
            best = torch.load("best.pt")
        """,
        remedy="checkpoint = torch.load('model.pt', map_location='cpu')",
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_rule(tmp_path: Path, case: Case) -> None:
    confirm(tmp_path, case)


def test_a_rank_is_known_by_where_it_comes_from(tmp_path: Path) -> None:
    """Called rank, but taken from LOCAL_RANK; and the other way round."""
    text = SETUP + 'rank = int(os.environ["{}"])\nif rank == 0:\n    torch.save(model, "model.pt")\n'
    assert [one.check for one in look(tmp_path, text.format("LOCAL_RANK"))] == ["save-on-each-host"]
    assert look(tmp_path, text.format("RANK")) == []


def test_who_calls_is_seen_in_other_files(tmp_path: Path) -> None:
    tools = 'import torch\ndef save(model):\n    torch.save(model, "model.pt")\n'
    caller = SETUP + "from tools import save\n{}save(model)\n"
    everywhere = look(tmp_path, caller.format(""), modules={"tools.py": tools})
    assert [(one.check, one.where) for one in everywhere] == [("save-on-every-rank", "tools.py:3")]
    assert look(tmp_path, caller.format("if is_main_process():\n    "), modules={"tools.py": tools}) == []


def test_a_remedy_for_accelerate_asks_accelerate(tmp_path: Path) -> None:
    text = "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\ntorch.save(model, 'm.pt')\n"
    (found,) = look(tmp_path, text)
    assert found.remedy == "if accelerator.is_main_process: torch.save(model, 'm.pt')"


def test_a_file_that_every_rank_loads_again_has_to_reach_all_hosts(tmp_path: Path) -> None:
    text = SETUP + 'local_rank = int(os.environ["LOCAL_RANK"])\nif local_rank == 0:\n    torch.save(1, "m.pt")\n'
    loading = 'state = torch.load("m.pt", map_location="cpu")\n'
    ((alone,), (loaded,)) = look(tmp_path, text), look(tmp_path, text + loading)
    assert alone.remedy == "if dist.get_rank() == 0:"
    assert loaded.remedy.startswith(f"{alone.remedy}  # and to a disk that all hosts share")


def test_where_the_group_may_not_be_made_the_remedy_asks_first(tmp_path: Path) -> None:
    text = IMPORTS + (
        'local_rank = int(os.environ.get("LOCAL_RANK", 0))\n'
        'if "RANK" in os.environ:\n    dist.init_process_group("nccl")\n'
        'if local_rank == 0:\n    torch.save(model, "model.pt")\n'
    )
    [found] = [one for one in look(tmp_path, text) if one.check == "save-on-each-host"]
    assert found.remedy == "if (dist.get_rank() if dist.is_initialized() else 0) == 0:"
