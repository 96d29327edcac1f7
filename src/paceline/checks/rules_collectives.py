"""What all ranks must do together."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from paceline.checks.findings import Finding, check
from paceline.checks.guards import Who, guards_of
from paceline.checks.program import Owned, Program
from paceline.checks.source import Source, argument_of, constant_of, parameters_of
from paceline.checks.training import Wrapper, training_of

_TOGETHER = {
    "torch.distributed": (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "reduce", "barrier"),
        *("broadcast_object_list", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
        *("gather", "gather_object", "all_to_all", "all_to_all_single", "monitored_barrier", "new_group"),
    ),
    "horovod.torch": (
        *("allreduce", "allreduce_", "allgather", "broadcast", "broadcast_", "broadcast_parameters", "barrier"),
        *("broadcast_optimizer_state", "broadcast_object", "alltoall", "reducescatter", "join"),
    ),
    "torch.distributed.checkpoint": ("save", "load", "save_state_dict", "load_state_dict"),
}
_COLLECTIVES = {f"{module}.{name}" for module, names in _TOGETHER.items() for name in names}
_COLLECTIVE_METHODS = {"wait_for_everyone", "gather_for_metrics", "pad_across_processes"}
"""Of accelerate's object."""
_SHARED_DECISION = (
    "on all ranks: torch.distributed.broadcast_object_list of rank 0's decision, and leave by what it brings"
)
_GROUPED = ("group", "process_group", "no_dist")


class Together(NamedTuple):
    """Something that needs all ranks, and the file it stands in."""

    source: Source
    call: ast.Call
    name: str
    wrapper: Wrapper | None = None


def _together(source: Source, call: ast.Call, wrappers: Mapping[str, Wrapper | None]) -> Together | None:
    """A collective, or the forward pass of a wrapped model; not one of some ranks' own group.

    `wrappers`: what the parameters of the function around it are wrapped in.
    """
    if any(argument_of(call, name) is not None for name in _GROUPED):
        return None
    name = source.resolve(call.func)
    if name in _COLLECTIVES:
        return Together(source, call, name.rpartition(".")[2])
    if isinstance(call.func, ast.Attribute) and call.func.attr in _COLLECTIVE_METHODS:
        return Together(source, call, call.func.attr)
    wrapper = _wrapper_of(source, call.func, wrappers)
    return Together(source, call, f"{ast.unparse(call.func)}(…)", wrapper) if wrapper else None


def _wrapper_of(source: Source, model: ast.expr, wrappers: Mapping[str, Wrapper | None]) -> Wrapper | None:
    if isinstance(model, ast.Name) and model.id in wrappers:
        return wrappers[model.id]
    is_own = isinstance(model, ast.Attribute) and isinstance(model.value, ast.Name) and model.value.id == "self"
    return training_of(source.program).wrapper_of(source, model) if is_own or isinstance(model, ast.Name) else None


def _reached(source: Source, call: ast.Call) -> Iterator[Together]:
    """What a call does together with all ranks: itself, or in the functions that it runs."""
    nothing: dict[str, Wrapper | None] = {}
    waiting, seen = [(source, call, nothing)], set[ast.AST]()
    while waiting:
        home, inner, wrappers = waiting.pop(0)
        together = _together(home, inner, wrappers)
        owned = home.program.find_function(home, inner)
        if together is not None:
            yield together
        elif owned is not None and owned.function not in seen:
            seen.add(owned.function)
            site = next((one for one in home.program.sites_of(owned.function) if one.node is inner), None)
            given = site.given if site is not None else {}
            passed: dict[str, Wrapper | None] = {
                name: _wrapper_of(home, value, wrappers) for name, value in given.items()
            }
            waiting += [(owned.source, below, passed) for below in _calls_in(owned)]


def _calls_in(owned: Owned) -> list[ast.Call]:
    """The calls that a function makes itself and, as far as can be seen, always makes in a run of several ranks."""
    home, function = owned
    guards = guards_of(home.program)
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and home.function_of(node) is function]
    return [call for call in calls if all(_is_passed(home, *condition) for condition in guards.conditions(home, call))]


def _is_passed(source: Source, test: ast.expr, truth: bool) -> bool:
    """Whether a run of several ranks meets a condition, for all that can be seen.

    What depends on the function's own parameters, or on its object, can't be.
    """
    function = source.function_of(test)
    own = {*parameters_of(function), "self"} if function is not None else set[str]()
    used = [node for node in ast.walk(test) if isinstance(node, ast.Name) and node.id in own]
    who = guards_of(source.program).who(source, test, truth=truth)
    if who is None:
        return not used
    return who.kind == "many" and all(isinstance(source.parents[node], ast.Attribute) for node in used)


def _is_matched(source: Source, call: ast.Call, who: Who, names: set[str]) -> bool:
    """The other ranks do the same elsewhere in this function: `if rank != 0: barrier()`."""
    function = source.function_of(call)
    wanted = "others" if who.kind == "one" else "one"
    for node in ast.walk(function or source.tree):
        if not isinstance(node, ast.Call) or node is call or source.function_of(node) is not function:
            continue
        kinds = guards_of(source.program).kinds(source, node)
        is_counterpart = wanted in kinds or (who.kind in kinds and _differs(source, call, node))
        if is_counterpart and any(reached.name in names for reached in _reached(source, node)):
            return True
    return False


def _differs(source: Source, one: ast.Call, other: ast.Call) -> bool:
    """They stand in different branches: `if rank == 0: … elif rank == 1: …`."""
    tests = [
        {ast.unparse(test) for test, _ in guards_of(source.program).conditions(source, node)} for node in (one, other)
    ]
    return not tests[0] <= tests[1] and not tests[1] <= tests[0]


def _lonely(source: Source) -> Iterator[tuple[ast.Call, Who, Together]]:
    """What needs all ranks, but is reached by some of them only."""
    guards = guards_of(source.program)
    reported: set[ast.AST] = set()
    for call in source.find(ast.Call):
        who = guards.own_guard(source, call)
        if who is None or who.kind not in ("one", "others") or not who.is_sure:
            continue
        found = next(_reached(source, call), None)
        if found is None or source.statement_of(call) in reported:
            continue
        if not _is_matched(source, call, who, {found.name}):
            reported.add(source.statement_of(call))
            yield call, who, found


@check("collective-on-one-rank")
def find_collective_on_one_rank(source: Source) -> Iterator[Finding]:
    """What all ranks must do together, all ranks reach.

    What it looks at
        Collectives and barriers of PyTorch, Horovod and accelerate, and forward passes of fully sharded models, below
        `if rank == 0` and its like, directly or in a function that is called there; not where the other ranks call
        the same in their branch, and not in groups.

    Why it matters
        The ranks that get there wait for the others, which never come: the run hangs until a timeout.

    How to mend it
        Move the call out of the branch, and leave in it only what the one rank does with the result.
    """
    for call, who, found in _lonely(source):
        if found.wrapper == "ddp":
            continue
        ranks = "one rank" if who.kind == "one" else "all ranks but one"
        way = "" if found.call is call else f", which calls {found.name} at {found.source.at(found.call)}"
        text = f"only {ranks} comes to {ast.unparse(call.func)}{way}: it waits for the others for ever"
        remedy = f"{ast.unparse(source.statement_of(call))}  # outside of the branch" if found.call is call else ""
        yield source.finding("collective-on-one-rank", "failure", call, text, remedy)


@check("forward-on-one-rank")
def find_forward_on_one_rank(source: Source) -> Iterator[Finding]:
    """A DistributedDataParallel model is called by all ranks, or not through its wrapper.

    What it looks at
        Calls of a wrapped model below `if rank == 0` and its like, directly or in a function that is called there, as
        in evaluations that rank 0 does alone; where the model may have buffers.

    Why it matters
        The wrapper broadcasts the model's buffers before a forward pass. If it has any, as with batch normalisation,
        rank 0 waits there for ever, or takes part in the others' next step.

    How to mend it
        Call what is inside the wrapper: `model.module`, where there is a wrapper.
    """
    if not _has_buffers(source.program):
        return
    for call, _, found in _lonely(source):
        if found.wrapper != "ddp":
            continue
        model = ast.unparse(found.call.func)
        place = "" if found.call is call else f", at {found.source.at(found.call)}"
        text = f"rank 0 alone calls {model} through its wrapper{place}; with buffers (batch normalisation) it hangs"
        inner = f'getattr({model}, "module", {model})'  # it may not be wrapped in a run of one process
        remedy = found.source.replaced((found.call.func, inner))
        if found.call is not call:
            remedy = f"{remedy}  # at {found.source.at(found.call)}, or pass {inner}"
        yield source.finding("forward-on-one-rank", "warning", call, text, remedy)


@functools.lru_cache(maxsize=1)
def _has_buffers(program: Program) -> bool:
    """Models come from elsewhere, or have batch normalisation or buffers of their own, and the wrapper cares."""
    if any(
        constant_of(argument_of(call, "broadcast_buffers")) is False
        for source in program.sources
        for call in source.find(ast.Call)
    ):
        return False
    if any(name.startswith(("torchvision.models.", "timm.")) or "BatchNorm" in name for name in program.dotted_names):
        return True
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "register_buffer"
        and not list(guards_of(program).conditions(source, call))
        for source in program.sources
        for call in source.find(ast.Call)
    )


@check("one-rank-leaves")
def find_one_rank_leaves(source: Source) -> Iterator[Finding]:
    """All ranks leave the training loop together.

    What it looks at
        `break` and `return` below `if rank == 0` and its like, inside a loop that trains.

    Why it matters
        An early stop that one rank decides for itself leaves the others waiting for its gradients.

    How to mend it
        Broadcast the decision, and let every rank act on it.
    """
    training = training_of(source.program)
    if not training.wrappers:
        return
    for loop in training.loops(source):
        leaving = [node for node in ast.walk(loop) if isinstance(node, ast.Break | ast.Return)]
        whos = {node: _who_leaves(source, loop, node) for node in leaving}
        if any(who is not None and who.kind == "others" for who in whos.values()):
            continue
        for node, who in whos.items():
            inner = next((parent for parent in source.ancestors(node) if isinstance(parent, ast.For | ast.While)), loop)
            if who is not None and who.kind == "one" and who.is_sure and training.learns_in(source, inner):
                text = "one rank leaves the loop here, and the others wait for its gradients for ever"
                yield source.finding("one-rank-leaves", "failure", node, text, _SHARED_DECISION)


def _who_leaves(source: Source, loop: ast.AST, node: ast.AST) -> Who | None:
    """Who comes to a `break` or `return`, by the conditions inside the loop."""
    inside = set(ast.walk(loop))
    if source.function_of(node) is not source.function_of(loop):
        return None
    guards = guards_of(source.program)
    whos = [guards.who(source, test, truth=truth) for test, truth in guards.conditions(source, node) if test in inside]
    return next((who for who in whos if who is not None and who.kind in ("one", "others")), None)
