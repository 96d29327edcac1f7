"""Who starts the ranks, how many there are, and where they meet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from paceline.checks.findings import Finding, Status, check
from paceline.checks.guards import guards_of
from paceline.checks.program import Program, Value
from paceline.checks.source import Function, Source, argument_of, constant_of, is_function, last_word
from paceline.checks.training import LOCAL_RANK_TEXT, count_text, gpu_count, is_sampler, training_of

MAX_PORT = 65535
_MEETING_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
# What is no choice in a script that trains on GPUs.
_ALWAYS = re.compile(r"^__name__ ==|^torch\.\w+\.is_available\(\)$|is_available\(\)$")
_ABOUT_LAUNCHERS = re.compile(r"environ|getenv|slurm|(?<![a-z])o?mpi(?![a-z])", re.I)
_HINT_OF_RANKS = re.compile(r"distributed|world_?size|local_?rank|get_rank|deepspeed|horovod|(^|[._])ddp", re.I)
_THIS_MACHINE = re.compile(r"^tcp://(localhost|127\.0\.0\.1|\[::1\])(:|$)")
_JOINING = (
    "run = paceline.init(); then run.prepare(…) for model and optimizer (make one if there is none), run.batches(…)"
)
_INIT = "torch.distributed.init_process_group"


class Condition(NamedTuple):
    """What must be true, or false, for a piece of code to run."""

    source: Source
    test: ast.expr
    truth: bool


def _conditions_above(source: Source, node: ast.AST, depth: int = 4) -> list[Condition]:
    """All conditions under which a node runs; where all callers of its function have some, those of the first, too."""
    found = [Condition(source, test, truth) for test, truth in guards_of(source.program).conditions(source, node)]
    found = [one for one in found if not _ALWAYS.search(ast.unparse(one.test))]
    function = source.function_of(node)
    sites = source.program.sites_of(function) if function is not None else []
    if depth and sites:
        above = [_conditions_above(site.source, site.node, depth - 1) for site in sites]
        if all(above):
            found += above[0]
    return found


def _is_alone(source: Source, node: ast.AST) -> bool:
    """Only a run of one process comes here, or one in which something has failed, as a look for variables."""
    if any(isinstance(parent, ast.ExceptHandler) for parent in source.ancestors(node)):
        return True
    guards = guards_of(source.program)
    for home, test, truth in _conditions_above(source, node):
        who = guards.who(home, test, truth=truth)
        if who is not None and who.kind == "single" and "initialized" not in ast.unparse(test):
            return True  # that a process group has not been made yet says nothing of it
    return False


@check("hard-coded-master")
def find_hard_coded_master(source: Source) -> Iterator[Finding]:
    """MASTER_ADDR and MASTER_PORT are left to the launcher.

    What it looks at
        Assignments to `os.environ["MASTER_ADDR"]` and `os.environ["MASTER_PORT"]`; not those that keep what is there
        already, and not those for other launchers, whose variables they ask for.

    Why it matters
        They replace what the launcher has set. With "localhost" each host waits for itself, or trains by itself; a
        fixed port may be taken, by a second run for example.

    How to mend it
        Delete the lines, or set the variables only where they are missing.
    """
    if "submitit" in source.names:
        return  # a launcher of its own
    by_function: dict[Function | None, list[tuple[ast.stmt, str, ast.expr]]] = {}
    for node, name, value in _meeting_assignments(source):
        is_choice = any(map(_asks_environment, _conditions_above(source, node)))
        is_kept = is_choice or _keeps_what_is_there(source, value, name)
        if (_is_no_port(name, value) or not is_kept) and not _is_alone(source, node):
            by_function.setdefault(source.function_of(node), []).append((node, name, value))
    for (node, name, value), *others in by_function.values():
        is_fixed = constant_of(value) is not None
        status: Status = "failure" if is_fixed and not _conditions_above(source, node) else "warning"
        beside = [one for one in others if one[1] != name and not _is_no_port(*one[1:])][:1]
        also = "".join(f", and {other} in line {source.line_of(where)}" for where, other, _ in beside)
        text = f"{name} is set to {ast.unparse(value)} here{also}, whatever the launcher has chosen"
        pairs = [(name, value), *((other, given) for _, other, given in beside)]
        remedy = "; ".join(f'os.environ.setdefault("{one}", {ast.unparse(given)})' for one, given in pairs)
        remedy += "  # in place of both lines" if beside else ""
        if _is_no_port(name, value):
            status, text = "failure", f"{constant_of(value)} is no port: the highest one is {MAX_PORT}"
            remedy = "delete this line: the launcher sets MASTER_PORT"
        yield source.finding("hard-coded-master", status, node, text, remedy)


def _meeting_assignments(source: Source) -> Iterator[tuple[ast.stmt, str, ast.expr]]:
    for target, one in source.all_assignments:
        if isinstance(target, ast.Subscript) and target in source.live and source.resolve(target.value) == "os.environ":
            name = constant_of(target.slice)
            if isinstance(name, str) and name in _MEETING_VARIABLES:
                yield one.statement, name, one.value


def _is_no_port(name: str, value: ast.expr) -> bool:
    port = constant_of(value)
    is_number = isinstance(port, int) or (isinstance(port, str) and port.isdecimal())
    return name == "MASTER_PORT" and is_number and int(str(port)) > MAX_PORT


def _asks_environment(condition: Condition) -> bool:
    """It looks for variables, or it is about a scheduler."""
    return bool(_ABOUT_LAUNCHERS.search(ast.unparse(condition.test)))


def _keeps_what_is_there(source: Source, value: ast.expr, name: str) -> bool:
    origins = source.program.origins(source, value)
    return any(name in ast.unparse(node) for _, node in origins) or name in ast.unparse(value)


@check("fixed-meeting-point")
def find_fixed_meeting_point(source: Source) -> Iterator[Finding]:
    """The ranks meet where the launcher says.

    What it looks at
        The `init_method` of `init_process_group`, and the default of the argument that it comes from.

    Why it matters
        `tcp://localhost` is another machine on each host; any other fixed address ignores the one that was found to
        work. `file://` needs a file system that all hosts share, and a file that no earlier run has left.

    How to mend it
        Use `env://`, which is also the default.
    """
    for call in source.find(ast.Call):
        method = argument_of(call, "init_method", 1)
        if source.resolve(call.func) != _INIT or method is None or _is_alone(source, call):
            continue
        for origin in source.program.origins(source, method):
            home, node = origin
            address = constant_of(node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node)
            if isinstance(node, ast.Call) and last_word(node) == "format" and isinstance(node.func, ast.Attribute):
                address = constant_of(node.func.value)
            if not isinstance(address, str) or not address.startswith(("tcp://", "file://")):
                continue
            if address.startswith("tcp://{") or address == "tcp://" or _is_alone(home, node):
                continue  # an address that is made elsewhere, or that no other host comes to
            yield home.finding("fixed-meeting-point", *_judge_meeting(source, call, origin, address))


def _judge_meeting(source: Source, call: ast.Call, origin: Value, address: str) -> tuple[Status, ast.AST, str, str]:
    home, node = origin
    remedy = home.replaced((node, '"env://"'))
    option = _option_of(home, node)
    if option:  # as a default it might not do for a run of one process, which sets no variables
        remedy = f"start it with {option} env://"
    if address.startswith("file://"):
        return "warning", node, "the ranks meet in a file, which all hosts would have to share", remedy
    above = home.parents[node]
    is_default = isinstance(above, ast.keyword) and home.parents[above] is not call
    is_certain = not is_default and not _conditions_above(source, call)
    if _THIS_MACHINE.match(address):
        text = f"the ranks meet at {address}, which is another machine on each host"
        return "failure" if is_certain and home is source else "warning", node, text, remedy
    return "warning", node, f"the ranks meet at the fixed address {address}, whatever the launcher has chosen", remedy


def _option_of(source: Source, default: ast.expr) -> str:
    """The option of the command line that this is the default of; else empty."""
    call = source.parents[source.parents[default]]
    if not isinstance(source.parents[default], ast.keyword) or not isinstance(call, ast.Call):
        return ""
    flags = (constant_of(flag) for flag in call.args if last_word(call) == "add_argument")
    return next((flag for flag in flags if isinstance(flag, str) and flag.startswith("--")), "")


@check("own-workers")
def find_own_workers(source: Source) -> Iterator[Finding]:
    """The launcher starts the ranks, not the script.

    What it looks at
        `torch.multiprocessing.spawn`, and processes of `multiprocessing`, whose function makes a process group.

    Why it matters
        Each rank that the launcher starts would start ranks of its own: too many for the GPUs, or one training per
        host, all of which succeed.

    How to mend it
        Call the function, with the rank on the host in place of the process's index, and let `init_process_group` take
        rank and world size from the environment; samplers take them from the group.
    """
    for call in source.find(ast.Call):
        target, arguments = _started(source, call)
        if target is None or not _makes_process_group(source, target):
            continue
        status: Status = "warning" if _conditions_above(source, call) else "failure"
        is_counter = source.is_counter
        parts = ['int(os.environ.get("RANK", 0))' if is_counter(part) else ast.unparse(part) for part in arguments]
        direct = f"{ast.unparse(target)}({', '.join(parts)})"
        remedy = (
            f"call {direct} once and start no processes; leave rank, world_size and num_replicas out of"
            " init_process_group and of samplers, which then ask the launcher and the group"
        )
        text = "this starts ranks of its own on every host, beside those of the launcher"
        yield source.finding("own-workers", status, call, text, remedy)


def _started(source: Source, call: ast.Call) -> tuple[ast.expr | None, list[ast.expr]]:
    """The function that runs in new processes, and what to call it with."""
    name = source.resolve(call.func)
    local_rank = ast.parse(LOCAL_RANK_TEXT, mode="eval").body
    if name in ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"):
        given = argument_of(call, "args", 1)
        return argument_of(call, "fn", 0), [local_rank, *(given.elts if isinstance(given, ast.Tuple) else [])]
    if name.rpartition(".")[2] == "Process" and "multiprocessing" in name:
        given = argument_of(call, "args")
        return argument_of(call, "target"), given.elts if isinstance(given, ast.Tuple) else []
    return None, []


def _makes_process_group(source: Source, target: ast.expr) -> bool:
    """The function, or one that it calls, calls `init_process_group`; or it is unknown, and some function does."""
    found = source.program.find_definition(source, target)
    if found is None or not is_function(found[1]):
        return _INIT in source.program.dotted_names and not isinstance(target, ast.Attribute)
    waiting, seen = [(found[0], found[1])], {found[1]}
    while waiting:
        home, function = waiting.pop()
        for inner in ast.walk(function):
            if not isinstance(inner, ast.Call):
                continue
            if home.resolve(inner.func) == _INIT:
                return True
            owned = source.program.find_function(home, inner)
            if owned is not None and owned.function not in seen:
                seen.add(owned.function)
                waiting.append((owned.source, owned.function))
    return False


@check("one-host-world")
def find_one_host_world(source: Source) -> Iterator[Finding]:
    """The number of ranks is not the number of this host's GPUs.

    What it looks at
        `torch.cuda.device_count()` used as the `world_size` of a process group, as the `num_replicas` of a sampler, or
        to divide what was summed up over all ranks; and LOCAL_RANK used as the `rank` of a group or a sampler.

    Why it matters
        With several hosts there are more ranks than that: the group never comes together, or each host makes its
        own; means come out too large, and every host trains on the same part of the data.

    How to mend it
        Leave `world_size` to the environment; elsewhere use `torch.distributed.get_world_size()`.
    """
    for call in source.find(ast.Call):
        name = source.resolve(call.func)
        if name not in (_INIT, "datasets.distributed.split_dataset_by_node") and not is_sampler(name):
            continue
        size = argument_of(call, "world_size", 3) or argument_of(call, "num_replicas", 1 if is_sampler(name) else None)
        yield from _judge_rank(source, call)
        counted = gpu_count(source, size) if size is not None else None
        if counted is not None and size is not None and not _is_alone(source, call):
            text = "the number of ranks is taken from this host's GPUs, but there are more hosts"
            size_text = f'int(os.environ.get("WORLD_SIZE", {ast.unparse(counted.node)}))'
            remedy = counted.source.replaced((counted.node, size_text))
            yield counted.source.finding("one-host-world", "failure", counted.node, text, remedy)
    for node in source.find(ast.AugAssign, ast.BinOp):
        divisor = node.value if isinstance(node, ast.AugAssign) else node.right
        function = source.function_of(node)
        if not isinstance(node.op, ast.Div) or function is None or not _sums_over_ranks(source, function):
            continue
        if gpu_count(source, divisor) is not None:
            text = f"what was summed over all ranks is divided by {ast.unparse(divisor)}, this host's GPUs"
            remedy = source.replaced((divisor, count_text(source)))
            yield source.finding("one-host-world", "warning", node, text, remedy)


def _judge_rank(source: Source, call: ast.Call) -> Iterator[Finding]:
    """The rank that is passed is the one on the host, as the launcher gives it."""
    rank = argument_of(call, "rank")
    if rank is None or _is_alone(source, call) or not guards_of(source.program).is_local_rank(source, rank):
        return
    text = f"{ast.unparse(rank)} is the rank on the host, so that every host has the same ranks"
    status: Status = "failure" if source.resolve(call.func) == _INIT else "warning"
    remedy = source.replaced((rank, f'int(os.environ.get("RANK", {ast.unparse(rank)}))'))
    yield source.finding("one-host-world", status, rank, text, remedy)


def _sums_over_ranks(source: Source, function: Function) -> bool:
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(
        source.resolve(call.func) in ("torch.distributed.all_reduce", "torch.distributed.reduce") for call in calls
    )


@check("no-process-group")
def find_no_process_group(source: Source) -> Iterator[Finding]:
    """A script that trains joins the other ranks.

    What it looks at
        Scripts that call `.backward()` and use neither `torch.distributed` nor any framework that does, nor speak of
        ranks or of distribution anywhere.

    Why it matters
        Every rank would train the whole model by itself, on the same data, and all would write the same files.

    How to mend it
        Three lines: `run = paceline.init()`, `run.prepare` for the model and the optimizer, `run.batches` for the
        data. Or make a process group and wrap the model in DistributedDataParallel.
    """
    training = training_of(source.program)
    if source is not source.program.main or training.is_distributed or not training.backwards:
        return
    if any(_HINT_OF_RANKS.search(name) for name in source.program.dotted_names):
        return  # it may come together with others in a way that isn't seen
    home, call = training.backwards[0]
    text = "this trains without a process group: every rank would train by itself"
    yield home.finding("no-process-group", "failure", call, text, _JOINING)


@check("success-without-training")
def find_success_without_training(source: Source) -> Iterator[Finding]:
    """A rank that can't train fails.

    What it looks at
        `exit()`, `sys.exit()` and their like without a status other than 0, in distributed scripts, below a condition
        that counts GPUs.

    Why it matters
        Status 0 means that the rank has done its work. A host with too few GPUs looks as if it had trained, and a run
        in which all hosts have too few succeeds; where some have enough, these wait for the others.

    How to mend it
        Leave with a status that isn't 0, or raise an error.
    """
    if not training_of(source.program).is_distributed:
        return
    for call in source.find(ast.Call):
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        is_success = all(isinstance(status, ast.Constant) and status.value in (0, None) for status in given)
        statement = source.statement_of(call)
        around = source.parents[statement]
        if source.resolve(call.func) not in ("exit", "quit", "sys.exit", "os._exit") or not is_success:
            continue
        if isinstance(around, ast.If) and statement in around.body and _counts_gpus(source, around.test):
            text = "a host whose number of GPUs doesn't do leaves here with status 0, as if it had trained"
            yield source.finding("success-without-training", "warning", call, text, "raise SystemExit(1)")


def _counts_gpus(source: Source, test: ast.expr) -> bool:
    """It, or a function of the project that it calls, asks for the number of this host's GPUs."""
    for node in ast.walk(test):
        if not isinstance(node, ast.expr) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)):
            continue
        if gpu_count(source, node) is not None:
            return True
        owned = source.program.find_function(source, node) if isinstance(node, ast.Call) else None
        calls = (inner for inner in ast.walk(owned.function) if isinstance(inner, ast.Call)) if owned else ()
        if any(last_word(call) == "device_count" for call in calls):
            return True
    return False


def find_nccl(program: Program) -> str:
    """Where a process group is made with NCCL under no condition, as `train.py:12`; empty for nowhere."""
    for source in program.sources:
        for call in source.find(ast.Call):
            is_nccl = source.resolve(call.func) == _INIT and constant_of(argument_of(call, "backend", 0)) == "nccl"
            if is_nccl and not _conditions_above(source, call):
                return source.at(call)
    return ""
