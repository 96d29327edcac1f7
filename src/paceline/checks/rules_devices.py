"""Which GPU a rank takes."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from paceline.checks.findings import Finding, check
from paceline.checks.guards import guards_of
from paceline.checks.program import Program
from paceline.checks.source import Source, argument_of, constant_of, is_function, last_word
from paceline.checks.training import LOCAL_RANK_TEXT, is_one_process_only, training_of, wrapper_named

_DEVICE = re.compile(r"^cuda:(?P<index>\d)$")
_FOR_DEVICE = re.compile(r"device|gpu|cuda|local_?rank", re.I)
_SCHEDULER = re.compile(r"slurm|(?<![a-z])o?p?mpi?_|hvd", re.I)
_LOCAL_RANK_FLAGS = ("--local_rank", "--local-rank")
_SETTERS = {"torch.cuda.set_device": 0, "torch.set_default_device": 0, "torch.accelerator.set_device_index": 0}


@check("hard-coded-device")
def find_hard_coded_device(source: Source) -> Iterator[Finding]:
    """No GPU is named by its number.

    What it looks at
        "cuda:0" and its like, `.cuda(0)`, `torch.cuda.set_device(0)` and `device_ids=[0]`; not where the script has
        found out that it is the only process, not a default that it replaces later, and not where each process sets
        CUDA_VISIBLE_DEVICES for itself.

    Why it matters
        All ranks of a host would share that GPU: out of memory, or an error of NCCL's, and the others idle.

    How to mend it
        Take the GPU whose number is LOCAL_RANK, which every launcher sets.
    """
    for node, index in _numbered_devices(source) if not _hides_gpus(source.program) else ():
        who = guards_of(source.program).guard(source, node)
        if who is not None and who.kind in ("single", "one"):
            continue  # the first rank has the first GPU
        if _is_default(source, node) or _is_replaced_later(source, node) or _is_always_given(source, node):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            remedy = source.replaced((node, '"cuda:" + os.environ.get("LOCAL_RANK", "0")'))
        else:
            remedy = source.replaced((node, LOCAL_RANK_TEXT))
        text = f"every rank of a host would use GPU {index}"
        yield source.finding("hard-coded-device", "warning", node, text, remedy)


@functools.lru_cache(maxsize=1)
def _hides_gpus(program: Program) -> bool:
    """Each process lets itself see one GPU, which then is number 0."""
    return any(
        isinstance(target, ast.Subscript)
        and constant_of(target.slice) == "CUDA_VISIBLE_DEVICES"
        and not isinstance(one.value, ast.Constant)
        for source in program.sources
        for target, one in source.all_assignments
    )


def _numbered_devices(source: Source) -> Iterator[tuple[ast.expr, int]]:
    """The literals that stand for one GPU."""
    for node in source.find(ast.Constant):
        if isinstance(node.value, str) and (match := _DEVICE.match(node.value)) and _is_used_as_device(source, node):
            yield node, int(match["index"])
    for call in source.find(ast.Call):
        given = _device_index(source, call)
        if given is not None and type(number := constant_of(given)) is int and number >= 0:
            yield given, number


def _is_used_as_device(source: Source, node: ast.Constant) -> bool:
    """Not compared with, nor the key of a dictionary."""
    parent = source.parents[node]
    is_key = isinstance(parent, ast.Dict) and node in parent.keys
    return not (is_key or isinstance(parent, ast.Compare | ast.Expr | ast.Subscript | ast.Tuple | ast.List))


def _device_index(source: Source, call: ast.Call) -> ast.expr | None:
    """The number of a GPU that a call is given, if it takes one."""
    name = source.resolve(call.func)
    if name in _SETTERS:
        return argument_of(call, "device", 0)
    if name == "torch.device" and len(call.args) == 2:
        return call.args[1]
    if wrapper_named(name) == "ddp":
        ids = argument_of(call, "device_ids", 1)
        return ids.elts[0] if isinstance(ids, ast.List) and len(ids.elts) == 1 else None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not name.startswith("torch."):
        return argument_of(call, "device", 0)
    return None


def _is_default(source: Source, node: ast.expr) -> bool:
    """It is only given a name or returned, in a script that elsewhere takes a GPU by its rank."""
    statement = source.statement_of(node)
    is_direct = isinstance(source.parents[node], ast.Call) and last_word(source.parents[node]) in ("to", "cuda")
    if is_direct or not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return):
        return False
    guards = guards_of(source.program)
    homes = source.program.sources
    return any(guards.rank_scope(home, given) == "host" for home in homes for given in _devices_given(home))


def _is_always_given(source: Source, default: ast.expr) -> bool:
    """It is a parameter's default, and all known callers pass something else."""
    arguments, function = source.parents[default], source.parents[source.parents[default]]
    if not isinstance(arguments, ast.arguments) or not is_function(function) or default not in arguments.defaults:
        return False
    positional = [*arguments.posonlyargs, *arguments.args]
    name = positional[len(positional) - len(arguments.defaults) + arguments.defaults.index(default)].arg
    sites = source.program.sites_of(function)
    return bool(sites) and all(name in site.given for site in sites)


def _is_replaced_later(source: Source, node: ast.expr) -> bool:
    """The same name is given a device by rank elsewhere."""
    statement = source.statement_of(node)
    targets = {ast.unparse(target) for target, one in source.all_assignments if one.statement is statement}
    others = (one.value for target, one in source.all_assignments if ast.unparse(target) in targets)
    return any(_mentions_rank(source, value) for value in others if value is not node)


def _mentions_rank(source: Source, expression: ast.expr) -> bool:
    guards = guards_of(source.program)
    parts = (
        node for node in ast.walk(expression) if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    )
    return any(guards.rank_scope(source, part) for part in parts)


@check("device-from-rank")
def find_device_from_rank(source: Source) -> Iterator[Finding]:
    """The GPU is chosen by the rank on the host, not by the rank in the run.

    What it looks at
        What is passed to `torch.cuda.set_device`, `.cuda()`, `.to()`, `torch.device("cuda", …)` and `device_ids`, and
        f"cuda:{…}". The rank modulo the number of GPUs is right: a host's ranks follow each other.

    Why it matters
        On the second host the ranks go on counting: rank 8 asks for a GPU 8 that isn't there.

    How to mend it
        Use LOCAL_RANK, which every launcher sets.
    """
    guards = guards_of(source.program)
    seen: set[str] = set()
    for expression in _devices_given(source):
        text = ast.unparse(expression)
        if text in seen or guards.rank_scope(source, expression) != "run" or is_one_process_only(source, expression):
            continue
        seen.add(text)
        is_sure = guards.is_surely_rank_of_run(source, expression)
        same = (source.line_of(one) for one in _devices_given(source) if ast.unparse(one) == text)
        others = sorted({line for line in same if line != source.line_of(expression)})
        remedy = source.replaced((expression, LOCAL_RANK_TEXT))
        if others:
            remedy = f"{remedy}  # and the same in line{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        if all(constant_of(node) is not None for _, node in source.program.origins(source, expression)):
            continue  # called a rank, but nobody is seen to give it one
        yield source.finding(
            "device-from-rank",
            "failure" if is_sure else "warning",
            expression,
            f"{text} is the rank in the whole run, so that the second host is asked for GPUs that it hasn't got",
            remedy,
        )


def _devices_given(source: Source) -> Iterator[ast.expr]:
    """What is passed as a GPU's number."""
    for call in source.find(ast.Call):
        given = _device_index(source, call)
        if given is None and isinstance(call.func, ast.Attribute) and call.func.attr == "to" and len(call.args) == 1:
            given = call.args[0] if isinstance(call.args[0], ast.Name | ast.Attribute) else None
        if given is not None:
            yield given
    for text in source.find(ast.JoinedStr):
        parts = text.values
        if len(parts) == 2 and constant_of(parts[0]) == "cuda:" and isinstance(parts[1], ast.FormattedValue):
            yield parts[1].value


@check("local-rank-argument")
def find_local_rank_argument(source: Source) -> Iterator[Finding]:
    """The rank on the host comes from the environment.

    What it looks at
        An argument `--local_rank` or `--local-rank` that the script uses and never sets itself, in a script that
        doesn't name the variable LOCAL_RANK.

    Why it matters
        `torch.distributed.launch` passed this argument. torchrun and `paceline run` pass none, so that it keeps its
        default on every rank, and all ranks of a host take the same GPU, or fail.

    How to mend it
        Let the argument's default be LOCAL_RANK.
    """
    program = source.program
    if not training_of(program).is_plain or _reads_local_rank(program):
        return
    for name, home, call in [(name, *one) for name, calls in program.arguments.items() for one in calls]:
        if home is not source or not any(constant_of(flag) in _LOCAL_RANK_FLAGS for flag in call.args):
            continue
        default = argument_of(call, "default")
        is_used = any(node.attr == name for other in program.sources for node in other.find(ast.Attribute))
        is_set = any(
            isinstance(target, ast.Attribute) and target.attr == name and last_word(one.value) not in ("", name)
            for target, one in source.all_assignments
            if one.index is None
        )
        if is_used and not is_set and (default is None or constant_of(default) is not None):
            is_required = constant_of(argument_of(call, "required")) is True
            then = "argparse ends them all" if is_required else "every rank keeps its default"
            text = f"torchrun and paceline pass no --local_rank to the ranks, so that {then}"
            yield source.finding("local-rank-argument", "failure", call, text, _from_environment(source, call))


def _from_environment(source: Source, call: ast.Call) -> str:
    """The argument's line with the environment's value as its default, no longer required."""
    value = 'int(os.environ.get("LOCAL_RANK", 0))'
    kept = [keyword for keyword in call.keywords if keyword.arg not in ("required", "default")]
    if len(kept) == len(call.keywords) or argument_of(call, "required") is None:
        return source.with_keyword(call, "default", value)
    parts = [ast.unparse(part) for part in [*call.args, *kept]]
    return source.replaced((call, f"{ast.unparse(call.func)}({', '.join(parts)}, default={value})"))


@functools.lru_cache(maxsize=1)
def _reads_local_rank(program: Program) -> bool:
    return any(node.value == "LOCAL_RANK" for source in program.sources for node in source.find(ast.Constant))


@check("data-parallel")
def find_data_parallel(source: Source) -> Iterator[Finding]:
    """Models are wrapped in DistributedDataParallel, not in DataParallel.

    What it looks at
        `torch.nn.DataParallel`, where it isn't what a distributed script falls back to.

    Why it matters
        DataParallel drives all GPUs of a host from one process and knows nothing of other hosts. Started once per
        GPU, every process would take all of them.

    How to mend it
        Wrap the model in DistributedDataParallel, with one GPU per rank.
    """
    for call in source.find(ast.Call):
        if source.resolve(call.func) not in ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
            continue
        is_choice = any(True for _ in guards_of(source.program).conditions(source, call))
        if is_one_process_only(source, call) or (is_choice and training_of(source.program).is_distributed):
            continue
        model = ast.unparse(argument_of(call, "module", 0) or ast.Name("model"))
        wrapped = f"torch.nn.parallel.DistributedDataParallel({model}, device_ids=[{LOCAL_RANK_TEXT}])"
        text = "DataParallel takes all GPUs of its host for one process, and knows no other hosts"
        remedy = f"{source.replaced((call, wrapped))}  # after init_process_group, with the model on this GPU"
        yield source.finding("data-parallel", "warning", call, text, remedy)
