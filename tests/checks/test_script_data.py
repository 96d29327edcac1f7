"""Rules about how the data is divided among the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_cases import SETUP, Case, confirm, look

WRAPPED = SETUP + "dataset = make(); model = DDP(nn.Linear(1, 1))\n"

SCORED = SETUP + "for batch in test_batches:\n    right += count(batch)\n"

CASES = [
    Case(
        check="missing-set-epoch",
        bad="""
        sampler, shuffle = DistributedSampler(dataset), False  #!
        loader = DataLoader(dataset, sampler=sampler)
        for epoch in range(9):
            for x in loader: pass
        """,
        good="""
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, sampler=sampler)
        for epoch in range(9):
            loader.sampler.set_epoch(epoch)
            for x in loader: pass
        """,
        remedy="sampler.set_epoch(epoch)  # first in the loop of train.py:12",
    ),
    Case(
        check="missing-set-epoch",
        bad="""
        train_loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=True))  #!
        for i, e in enumerate(range(args.epochs)):
            for x in train_loader: pass
        """,
        good="""
        train_loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False))
        val_loader = DataLoader(dataset, sampler=DistributedSampler(dataset))
        sampler = DistributedSampler(dataset)
        test_loader = DataLoader(dataset, sampler=sampler)
        for e in range(args.epochs):
            for x in train_loader: pass
        """,
        remedy="train_loader.sampler.set_epoch(i)",
    ),
    Case(
        check="missing-set-epoch",
        bad="sampler = DistributedSampler(dataset)  #!\nfor epoch in range(9): pass\n",
        good="sampler = DistributedSampler(dataset)\nfor x in DataLoader(dataset, sampler=sampler): pass\n",
    ),
    Case(
        check="unsharded-training-data",
        bad="loader = DataLoader(dataset, 32, shuffle=True, num_workers=2)  #!\n",
        good="""
        test_loader = DataLoader(dataset, 32, shuffle=True)
        loader = DataLoader(dataset, 32, sampler=DistributedSampler(dataset))
        other = DataLoader(dataset, **options)
        if dist.get_world_size() == 1:
            train_loader = DataLoader(dataset, 32, shuffle=True)
        """,
        remedy="DataLoader(dataset, 32, num_workers=2, sampler=torch.utils.data.DistributedSampler(dataset))",
        head=WRAPPED,
    ),
    Case(
        check="unsharded-training-data",
        bad="train_loader = DataLoader(dataset)  #!\n",
        good="""
        class Stream(torch.utils.data.IterableDataset):
            pass
        train_loader = DataLoader(Stream())
        part = split_dataset_by_node(dataset, rank=dist.get_rank(), world_size=dist.get_world_size())
        train_part = DataLoader(part, shuffle=True)
        """,
        head=WRAPPED,
    ),
    Case(
        check="unsharded-training-data",
        bad="import horovod.torch as hvd\nhvd.init()\ntrain_loader = DataLoader(dataset)  #!\n",
        remedy="DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())",
        good="""
        from accelerate import Accelerator
        accelerator = Accelerator()
        train_loader = accelerator.prepare(DataLoader(dataset, shuffle=True))
        """,
        head=WRAPPED,
    ),
    Case(
        check="padded-evaluation",
        bad="val_sampler = DistributedSampler(val_set, shuffle=False)  #!\n",
        good="val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)\n",
        remedy="val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)",
        head=SCORED,
    ),
    Case(
        check="padded-evaluation",
        bad="""
        def load(data):
            return DataLoader(data, sampler=DistributedSampler(data))  #!
        train, test = load(train_set), load(test_set)
        """,
        good="""
        def load(data):
            return DataLoader(data, sampler=DistributedSampler(data))
        train, more = load(train_set), load(latest_set)
        """,
        head=SCORED,
    ),
    Case(
        check="padded-evaluation",
        bad="""
        class Data:
            def __init__(self):
                sampler = DistributedSampler(test_set)  #!
                self.loader = DataLoader(test_set, sampler=sampler)
                self.test = self.loader
        evaluate(Data().test)
        """,
        good="""
        class Data:
            def __init__(self):
                sampler = DistributedSampler(test_set)
                self.loader = DataLoader(test_set, sampler=sampler)
                self.test = self.loader
        train(Data())
        """,
        head=SCORED,
    ),
    Case(
        check="padded-evaluation",
        bad="loader = DataLoader(dev_set, sampler=DistributedSampler(dev_set))  #!\n",
        good="""
        loader = DataLoader(dev_set, sampler=DistributedSampler(dev_set))
        scores = gather(loader)[: len(dev_set)]
        """,
        head=SCORED,
    ),
    Case(
        check="batch-size-and-learning-rate",
        status="ok",
        bad="loader = DataLoader(dataset, batch_size=64, sampler=DistributedSampler(dataset))  #!\n",
        good="""
        batch_size = 64 // dist.get_world_size()
        loader = DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset))
        """,
        remedy="batch_size=64 // dist.get_world_size()",
        head=WRAPPED,
    ),
    Case(
        check="batch-size-and-learning-rate",
        status="ok",
        bad="""
        gpus = torch.cuda.device_count()
        args.batch_size = args.batch_size // gpus  #!
        """,
        good="""
        args.batch_size = args.batch_size // dist.get_world_size()
        args.world_size = torch.cuda.device_count()
        args.world_size = int(os.environ["SLURM_NTASKS"])
        args.batch_size = args.batch_size // args.world_size
        print(args.batch_size // torch.cuda.device_count())
        threads = args.threads // torch.cuda.device_count()
        """,
        remedy="divide by the number of ranks on all hosts",
        head=WRAPPED,
    ),
    Case(
        check="batch-size-and-learning-rate",
        status="ok",
        bad="loader = DataLoader(dataset, 64, sampler=DistributedSampler(dataset))  #!\n",
        good="""
        loader = DataLoader(dataset, 64, sampler=DistributedSampler(dataset))
        lr = args.lr * dist.get_world_size()
        """,
        head=WRAPPED,
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_rule(tmp_path: Path, case: Case) -> None:
    confirm(tmp_path, case)


@pytest.mark.parametrize(
    "framework",
    [
        "from accelerate import Accelerator\nAccelerator()",
        "import lightning as L\nL.Trainer()",
        "import pytorch_lightning as pl\npl.Trainer()",
        "from transformers import Trainer\nTrainer().train()",
        "import paceline\npaceline.init()",
    ],
)
def test_frameworks_are_not_accused_of_what_they_do(tmp_path: Path, framework: str) -> None:
    """Each of these divides the data and tells the sampler the epoch by itself."""
    text = SETUP + framework + "\nmodel = DDP(nn.Linear(1, 1))\n"
    text += "train_loader = DataLoader(dataset, shuffle=True)\nval_sampler = DistributedSampler(val_set)\n"
    text += "train_sampler = DistributedSampler(train_set)\nfor epoch in range(9): pass\n"
    assert look(tmp_path, text) == []


@pytest.mark.parametrize(
    "evaluation",
    [
        "for batch in val_batches:\n    print(model(batch))",
        "rounds = 0\nfor batch in val_batches:\n    print(model(batch))\n    rounds += 1",
        "for value in values:\n    total += value",
        "def validate(feed):\n    while (batch := feed.take()) is not None:\n        print(batch)\nvalidate(1)",
    ],
)
def test_without_a_metric_repeated_samples_do_no_harm(tmp_path: Path, evaluation: str) -> None:
    assert look(tmp_path, f"{SETUP}val_sampler = DistributedSampler(val_set)\n{evaluation}\n") == []


def test_batches_that_are_asked_for_are_an_evaluation(tmp_path: Path) -> None:
    text = SETUP + "val_sampler = DistributedSampler(val_set)\ndef validate(feed):\n"
    text += "    while (batch := feed.take()) is not None:\n        accuracy.update(batch)\nvalidate(1)\n"
    assert [one.check for one in look(tmp_path, text)] == ["padded-evaluation"]


def test_a_sampler_that_may_not_be_made_is_named_with_care(tmp_path: Path) -> None:
    text = SETUP + "if len(sys.argv) > 1:\n    sampler = DistributedSampler(train_set)\nfor epoch in range(9): pass\n"
    (found,) = look(tmp_path, text)
    assert found.remedy == "sampler.set_epoch(epoch), if it was made  # first in the loop of train.py:11"


def test_a_sampler_that_nothing_holds_is_not_named(tmp_path: Path) -> None:
    text = WRAPPED + "for epoch in range(9):\n    run(DataLoader(dataset, sampler=DistributedSampler(dataset)))\n"
    (found,) = look(tmp_path, text)
    assert found.remedy.startswith("hand this sampler on")


def test_a_sampler_needs_a_group(tmp_path: Path) -> None:
    text = WRAPPED + "loader = DataLoader(dataset, shuffle=True)\n"
    always, sometimes = text, text.replace("dist.init", "if len(sys.argv) > 1: dist.init")
    told = [look(tmp_path, one)[0].remedy for one in (always, sometimes)]
    assert told[1] == f"{told[0]}  # where a process group is made, else as it is"


def test_a_sampler_out_of_reach_is_not_named(tmp_path: Path) -> None:
    text = (
        WRAPPED
        + """
class Data:
    def __init__(self):
        sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, sampler=sampler)
def fit():
    for epoch in range(9):
        for x in Data().loader: pass
fit()
"""
    )
    [found] = [one for one in look(tmp_path, text) if one.check == "missing-set-epoch"]
    assert found.remedy.startswith("hand this sampler on, and call its set_epoch(epoch)")
