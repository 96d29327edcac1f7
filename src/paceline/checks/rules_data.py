"""How the data is divided among the ranks."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from paceline.checks.findings import Finding, check
from paceline.checks.guards import guards_of
from paceline.checks.program import Program
from paceline.checks.source import Loop, Source, argument_of, constant_of, is_function, last_word
from paceline.checks.training import (
    count_text,
    gpu_count,
    is_loader,
    is_one_process_only,
    is_sampler,
    makes_group_always,
    training_of,
)

_EVALUATION = re.compile(r"(^|[_\W])(val|valid|validation|eval|evaluation|test|dev|query|gallery)(_|\d|\W|$)", re.I)
_TRAINING = re.compile(r"(^|[_\W])train", re.I)
_SHARDS = re.compile(r"shard|split_(dataset_)?by_(node|rank)|webdataset|wds\.|partition|scatter|IterableDataset", re.I)
_COUNTS = re.compile(r"gpu|world|device|rank|node|replica|procs|tasks|num_proc", re.I)
_BATCHES = re.compile(r"loader|(^|[_\W])dl(\W|$)|batch|metric", re.I)
_SCORING = re.compile(r"^_*(val|test|eval)", re.I)
"""Begins what functions are called that measure a model."""
_BATCH_SIZE = re.compile(r"batch|(^|_)bsz?$", re.I)
_ADDING = {"update", "append", "extend", "add", "add_batch", "accumulate", "all_reduce", "all_gather", "gather"}
_OWN_DIVISION = {"accelerate", "lightning", "deepspeed", "transformers", "paceline", "other"}
"""Frameworks that may divide the data themselves."""


def _names_around(source: Source, call: ast.Call) -> str:
    """What a loader or a sampler is called, what it is made of and for: as words; else the function that makes it."""
    statement = source.statement_of(call)
    targets = [ast.unparse(target) for target, one in source.all_assignments if one.statement is statement]
    dataset = argument_of(call, "dataset", 0)
    given = [ast.unparse(dataset)] if dataset is not None else []
    parent = source.parents.get(call)
    key = [parent.arg] if isinstance(parent, ast.keyword) and parent.arg and parent.arg != "sampler" else []
    loaders = [
        f"{ast.unparse(target)} {ast.unparse(argument_of(made, 'dataset', 0) or target)}"
        for target, made in _loaders_with(source, call)
    ]
    names = " ".join([*targets, *given, *key, *loaders])
    function = source.function_of(call)
    if function is None or _EVALUATION.search(names) or _TRAINING.search(names):
        return names
    return f"{names} {function.name}"


def _loaders_with(source: Source, sampler: ast.Call) -> list[tuple[ast.expr, ast.Call]]:
    """The loaders that use a sampler by its name, in the same function, with what they are assigned to."""
    statement, function = source.statement_of(sampler), source.function_of(sampler)
    targets = {ast.unparse(target) for target, one in source.all_assignments if one.statement is statement}
    return [
        (target, one.value)
        for target, one in source.all_assignments
        if isinstance(one.value, ast.Call)
        and source.function_of(target) is function
        and (used := argument_of(one.value, "sampler")) is not None
        and ast.unparse(used) in targets
    ]


def _is_unused(source: Source, sampler: ast.Call) -> bool:
    """Nothing reads the attributes that its loaders are kept in."""
    kept = [target.attr for target, _ in _loaders_with(source, sampler) if isinstance(target, ast.Attribute)]
    return bool(kept) and not any(_is_read(source.program, name) for name in kept)


@functools.lru_cache(maxsize=64)
def _is_read(program: Program, attribute: str) -> bool:
    """Something else is done with an attribute than to give it a second name that nothing reads."""
    for source in program.sources:
        for node in source.find(ast.Attribute):
            if node.attr != attribute or not isinstance(node.ctx, ast.Load):
                continue
            parent = source.parents[node]
            alias = parent.targets[0] if isinstance(parent, ast.Assign) else None
            if not isinstance(alias, ast.Attribute) or (alias.attr != attribute and _is_read(program, alias.attr)):
                return True
    return False


def _datasets_passed(source: Source, call: ast.Call) -> str:
    """What callers pass as the dataset, where it is a parameter."""
    dataset, function = argument_of(call, "dataset", 0), source.function_of(call)
    if not isinstance(dataset, ast.Name) or function is None:
        return ""
    sites = source.program.sites_of(function)
    return " ".join(ast.unparse(site.given[dataset.id]) for site in sites if dataset.id in site.given)


@functools.lru_cache(maxsize=1)
def _epoch_loop(program: Program) -> tuple[Source, Loop] | None:
    """The first loop over epochs."""
    for source in program.sources:
        for loop in source.find(ast.For, ast.While):
            head = [loop.target, loop.iter] if isinstance(loop, ast.For) else [loop.test]
            if any("epoch" in ast.unparse(part).lower() for part in head):
                return source, loop
    return None


@functools.lru_cache(maxsize=1)
def _tells_epoch(program: Program) -> bool:
    """Something calls `set_epoch`."""
    return any(node.attr == "set_epoch" for source in program.sources for node in source.find(ast.Attribute))


@check("missing-set-epoch")
def find_missing_set_epoch(source: Source) -> Iterator[Finding]:
    """A DistributedSampler is told the epoch.

    What it looks at
        Each DistributedSampler that shuffles, in a script with a loop over epochs in which nothing calls `set_epoch`.

    Why it matters
        The order is drawn from the seed and the epoch. If the epoch stays 0, every epoch has the same order, and each
        rank sees the same part of the data for ever.

    How to mend it
        Call `set_epoch` at the beginning of each epoch.
    """
    training = training_of(source.program)
    loop = _epoch_loop(source.program)
    if loop is None or _tells_epoch(source.program) or training.frameworks & (_OWN_DIVISION - {"deepspeed", "other"}):
        return
    for call in source.find(ast.Call):
        if not is_sampler(source.resolve(call.func)) or constant_of(argument_of(call, "shuffle", 3)) is False:
            continue
        names = _names_around(source, call)
        if _EVALUATION.search(names) and not _TRAINING.search(names):
            continue
        home, head = loop
        names = (
            [node.id for node in ast.walk(head.target) if isinstance(node, ast.Name)]
            if isinstance(head, ast.For)
            else []
        )
        epoch = next((name for name in names if "epoch" in name), names[0] if names else "epoch")
        text = "the sampler is never told the epoch, so that every epoch has the same order"
        is_in_reach = source is home and source.function_of(call) in (None, home.function_of(head))
        name = _sampler_name(source, call) if is_in_reach else None
        called = f"{name}.set_epoch({epoch})" if name else f"hand this sampler on, and call its set_epoch({epoch})"
        if any(True for _ in guards_of(source.program).conditions(source, call)):
            called = f"{called}, if it was made"
        remedy = f"{called}  # first in the loop of {home.at(head)}"
        yield source.finding("missing-set-epoch", "warning", call, text, remedy)


def _sampler_name(source: Source, call: ast.Call) -> str | None:
    """How the sampler can be named in the loop; None where nothing holds it."""
    statement = source.statement_of(call)
    pairs = [(target, one.value) for target, one in source.all_assignments if one.statement is statement]
    for target, value in pairs:
        if value is call or (isinstance(value, ast.IfExp) and call in (value.body, value.orelse)):
            return ast.unparse(target)
    return f"{ast.unparse(pairs[0][0])}.sampler" if pairs else None


@check("unsharded-training-data")
def find_unsharded_training_data(source: Source) -> Iterator[Finding]:
    """Each rank trains on its own part of the data.

    What it looks at
        The DataLoader of the training data, in scripts that train with DistributedDataParallel, fully sharded, or with
        Horovod: it should have a sampler, or a dataset that divides itself.

    Why it matters
        Without one, every rank goes through all of the data: an epoch takes as long as on one GPU.

    How to mend it
        Give the loader a DistributedSampler, in place of `shuffle=True`.
    """
    training = training_of(source.program)
    if not (training.wrappers or "horovod" in training.frameworks) or training.frameworks & _OWN_DIVISION:
        return
    for call in source.find(ast.Call):
        if not is_loader(source.resolve(call.func)) or _chooses_samples(source, call):
            continue
        names, passed = _names_around(source, call), _datasets_passed(source, call)
        is_shuffled = constant_of(argument_of(call, "shuffle", 2)) is True
        if _EVALUATION.search(names) or not (_TRAINING.search(f"{names} {passed}") or is_shuffled):
            continue
        who = guards_of(source.program).guard(source, call)
        if is_one_process_only(source, call) or (who and who.kind == "one") or _divides_itself(source, call):
            continue
        text = "every rank goes through all of the training data"
        yield source.finding("unsharded-training-data", "warning", call, text, _with_sampler(source, call))


def _chooses_samples(source: Source, call: ast.Call) -> bool:
    """It is given a sampler, or what cannot be seen from here; or it is one of several made for the same name."""
    if any(keyword.arg is None or keyword.arg in ("sampler", "batch_sampler") for keyword in call.keywords):
        return True
    if len(call.args) > 3 or any(isinstance(part, ast.Starred) for part in call.args):
        return True
    statement = source.statement_of(call)
    targets = {ast.unparse(target) for target, one in source.all_assignments if one.statement is statement}
    same = [one.value for target, one in source.all_assignments if ast.unparse(target) in targets]
    keywords = (keyword.arg for value in same if isinstance(value, ast.Call) for keyword in value.keywords)
    return any(keyword in ("sampler", "batch_sampler") for keyword in keywords)


def _divides_itself(source: Source, call: ast.Call) -> bool:
    """The dataset is made with a rank or a number of ranks, or its class asks for them."""
    dataset = argument_of(call, "dataset", 0)
    if dataset is None:
        return True
    guards = guards_of(source.program)
    waiting, seen = source.program.origins(source, dataset), set[ast.AST]()
    while waiting:
        home, node = waiting.pop()
        if node in seen or _SHARDS.search(ast.unparse(node)):
            return node not in seen
        seen.add(node)
        for part in ast.walk(node):
            if not isinstance(part, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
                continue
            if guards.rank_scope(home, part) or guards.is_count(home, part):
                return True
            found = home.program.find_definition(home, part) if not isinstance(part, ast.Call) else None
            if found is not None and not is_function(found[1]):
                code = ast.unparse(found[1])
                if _SHARDS.search(code) or "get_rank" in code or "get_world_size" in code or "RANK" in code:
                    return True
            elif isinstance(part, ast.Name) and len(seen) < 20:
                waiting += [origin for origin in home.program.origins(home, part) if origin.node not in seen]
    return False


def _with_sampler(source: Source, call: ast.Call) -> str:
    dataset = (
        ast.unparse(call.args[0]) if call.args else ast.unparse(argument_of(call, "dataset") or ast.Name("dataset"))
    )
    kept = [ast.unparse(part) for part in call.args[:2]]
    kept += [ast.unparse(keyword) for keyword in call.keywords if keyword.arg != "shuffle"]
    horovod = next((alias for alias, full in source.names.items() if full == "horovod.torch"), None)
    ranks = f", num_replicas={horovod}.size(), rank={horovod}.rank()" if horovod else ""
    sampler = f"sampler=torch.utils.data.DistributedSampler({dataset}{ranks})"
    remedy = source.replaced((call, f"{ast.unparse(call.func)}({', '.join([*kept, sampler])})"))
    is_in_any_case = horovod or makes_group_always(source.program)
    return remedy if is_in_any_case else f"{remedy}  # where a process group is made, else as it is"


@check("padded-evaluation")
def find_padded_evaluation(source: Source) -> Iterator[Finding]:
    """No sample is counted twice in an evaluation.

    What it looks at
        A DistributedSampler for data that is called val, valid, eval, test or dev, without `drop_last=True`, in scripts
        that add something up over batches without training on them.

    Why it matters
        It repeats samples until all ranks have equally many. Metrics so depend on the number of ranks, unless the
        repeated ones are taken out again.

    How to mend it
        `drop_last=True`, and the few samples that are left over on one rank. Then sum up right answers and samples
        over all ranks, and divide.
    """
    if training_of(source.program).frameworks & _OWN_DIVISION or _takes_repeated_out(source.program):
        return
    if not _has_metric(source.program):
        return
    for call in source.find(ast.Call):
        if not is_sampler(source.resolve(call.func)) or argument_of(call, "drop_last", 5) is not None:
            continue
        names = _names_around(source, call)
        dataset = argument_of(call, "dataset", 0)
        own = f"{names} {_datasets_passed(source, call)}"
        if dataset is None or not _EVALUATION.search(own) or is_one_process_only(source, call):
            continue
        if _is_unused(source, call):
            continue
        text = "where the ranks don't divide the number of samples, some are counted twice in the metrics"
        remedy = f"{source.with_keyword(call, 'drop_last', 'True')}  # and the samples left over on one rank"
        yield source.finding("padded-evaluation", "warning", call, text, remedy)


@functools.lru_cache(maxsize=1)
def _has_metric(program: Program) -> bool:
    """Something is added up in a loop over batches that doesn't train."""
    training = training_of(program)
    for source in program.sources:
        for loop in source.find(ast.For):
            head = ast.unparse(loop.iter)
            if training.learns_in(source, loop) or not (_BATCHES.search(head) or _EVALUATION.search(head)):
                continue
            if any(_is_sum(loop, node) or _adds_up(node) for node in ast.walk(loop)):
                return True
        for loop in source.find(ast.While):  # over a loader that is asked for one batch after the other
            function = source.function_of(loop)
            is_scoring = function is not None and _SCORING.match(function.name) is not None
            if is_scoring and not training.learns_in(source, loop) and any(map(_adds_up, ast.walk(loop))):
                return True
    return False


def _is_sum(loop: ast.For, node: ast.AST) -> bool:
    """`right += n`, but not the number of rounds."""
    is_counter = isinstance(node, ast.AugAssign) and constant_of(node.value) is not None and node in loop.body
    return isinstance(node, ast.AugAssign) and not is_counter


def _adds_up(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING


@functools.lru_cache(maxsize=1)
def _takes_repeated_out(program: Program) -> bool:
    """Gathered results are cut to the length of the data, `scores[: len(dataset)]`, or repeated ones taken out."""
    for source in program.sources:
        for node in source.find(ast.Slice, ast.Call):
            upper = node.upper if isinstance(node, ast.Slice) and node.lower is None else None
            if isinstance(upper, ast.Call) and last_word(upper) == "len":
                return True
            if isinstance(node, ast.Call) and node.keywords and source.resolve(node.func) == "numpy.unique":
                return True
    return False


@check("batch-size-and-learning-rate")
def note_batch_size(source: Source) -> Iterator[Finding]:
    """How the batch grows with the number of ranks, and whether the learning rate follows.

    What it looks at
        The training loader's batch size, and arithmetic with the number of ranks in lines about batches and learning
        rates, among them a batch size that is divided by the GPUs of one host. It is a note, never a warning.

    Why it matters
        With a batch size per rank, twice the ranks take twice the samples per step. Many scripts' results depend on the
        product of learning rate and batch, so that they change with the number of hosts.

    How to mend it
        Either divide the batch size by the number of ranks, or raise the learning rate with it, and say so.
    """
    training = training_of(source.program)
    if not training.wrappers or training.frameworks & _OWN_DIVISION:
        return
    for node in source.find(ast.BinOp):
        size, divisor = node.left, node.right
        is_kept = isinstance(source.statement_of(node), ast.Assign)  # not only printed
        if not is_kept or not isinstance(node.op, ast.Div | ast.FloorDiv) or not _BATCH_SIZE.search(last_word(size)):
            continue
        origins = [home.node for home in source.program.origins(source, divisor)]
        is_certain = all(constant_of(one) is not None or last_word(one) == "device_count" for one in origins)
        if is_certain and gpu_count(source, divisor) is not None and not is_one_process_only(source, node):
            text = f"{ast.unparse(size)} is divided by the GPUs of one host: the samples per step grow with the hosts"
            # In words: the process group may be made later.
            remedy = "divide by the number of ranks on all hosts, or raise the learning rate with the hosts"
            yield source.finding("batch-size-and-learning-rate", "ok", node, text, remedy)
            return
    if _is_scaled(source.program):
        return
    for call in source.find(ast.Call):
        size = argument_of(call, "batch_size", 1)
        if not is_loader(source.resolve(call.func)) or _EVALUATION.search(_names_around(source, call)):
            continue
        if size is None or (isinstance(size, ast.Constant) and size.value is None):
            continue
        text = (
            f"{ast.unparse(size)} samples per rank: the samples per step grow with the ranks, the learning rate doesn't"
        )
        remedy = source.replaced((size, f"{ast.unparse(size)} // {count_text(source)}"))
        yield source.finding("batch-size-and-learning-rate", "ok", call, text, remedy)
        return


@functools.lru_cache(maxsize=1)
def _is_scaled(program: Program) -> bool:
    """Somewhere a batch size, a learning rate or a number of accumulated steps is reckoned with the number of ranks."""
    guards = guards_of(program)
    for source in program.sources:
        for node in source.find(ast.BinOp, ast.AugAssign):
            if not isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv):
                continue
            sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
            line = ast.unparse(source.statement_of(node))
            counts = (guards.is_count(source, side) or _COUNTS.search(last_word(side)) for side in sides)
            if any(counts) and re.search(r"lr|learning_rate|batch|bsz|bs|accum", line):
                return True
    return False
