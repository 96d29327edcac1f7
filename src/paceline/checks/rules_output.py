"""What the ranks print."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from paceline.checks.findings import Finding, check
from paceline.checks.guards import guards_of
from paceline.checks.program import Program
from paceline.checks.source import Source, always_leaves, argument_of
from paceline.checks.training import main_text, training_of

_OWN_OUTPUT = {"lightning", "transformers", "other"}
_NAMES_RANK = re.compile(r"rank|gpu|host|device|node", re.I)


@check("print-on-every-rank")
def find_print_on_every_rank(source: Source) -> Iterator[Finding]:
    """One rank prints how the training goes.

    What it looks at
        The first `print` in each loop that trains, without a condition on the rank, that does not name the rank; not
        in scripts that have replaced `print`, not before an exit, and not where it comes but once (`if i == 100`).

    Why it matters
        Every line comes once per rank, and the values differ: each is one rank's own loss.

    How to mend it
        Let rank 0 print, at best a value that was averaged over the ranks.
    """
    training = training_of(source.program)
    if not training.is_distributed or training.frameworks & _OWN_OUTPUT or _replaces_print(source.program):
        return
    for loop in training.loops(source):
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and source.resolve(node.func) == "print"]
        for call in sorted(calls, key=lambda call: call.lineno):
            if source.function_of(call) is source.function_of(loop) and _is_meant_for_one(source, call):
                text = "every rank prints this line"
                remedy = source.only_if(main_text(source), call)
                yield source.finding("print-on-every-rank", "warning", call, text, remedy)
                break


@functools.lru_cache(maxsize=1)
def _replaces_print(program: Program) -> bool:
    """`builtins.print = …`, or a function or an import of that name."""
    if any(name.endswith(".print") for name in program.defined):
        return True
    return any(
        "print" in source.names
        or any(isinstance(target, ast.Attribute) and target.attr == "print" for target, _ in source.all_assignments)
        for source in program.sources
    )


def _is_meant_for_one(source: Source, call: ast.Call) -> bool:
    """Nothing says who prints, and the line doesn't either."""
    guards = guards_of(source.program)
    who = guards.guard(source, call)
    if (who is not None and who.kind != "many") or _NAMES_RANK.search(ast.unparse(call)):
        return False
    if guards.hangs_on_flag(source, call, depth=0):
        return False
    for parent in source.ancestors(call):
        if isinstance(parent, ast.ExceptHandler) or (isinstance(parent, ast.If) and always_leaves(source, parent.body)):
            return False
        if isinstance(parent, ast.If) and _comes_once(parent.test):
            return False
    return True


def _comes_once(test: ast.expr) -> bool:
    """`i == args.profiled`, but not `i % 10 == 0`."""
    nodes = list(ast.walk(test))
    is_equal = any(isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq) for node in nodes)
    return is_equal and not any(isinstance(node, ast.Mod) for node in nodes)


@check("progress-bar-on-every-rank")
def find_progress_bar_on_every_rank(source: Source) -> Iterator[Finding]:
    """One rank shows a progress bar.

    What it looks at
        `tqdm` and `trange` without `disable=`, without a condition on the rank, in the functions and loops that train;
        the first in each file.

    Why it matters
        The bars of all ranks overwrite each other.

    How to mend it
        Disable the bar on all ranks but the first.
    """
    training = training_of(source.program)
    if not training.is_distributed or training.frameworks & _OWN_OUTPUT:
        return
    calls = [call for call in source.find(ast.Call) if _shows_bar(source, call)]
    calls = [call for call in calls if not source.ignores(source.line_of(call), "progress-bar-on-every-rank")]
    if calls:
        others = f", and {len(calls) - 1} more in this file" if len(calls) > 1 else ""
        remedy = source.with_keyword(calls[0], "disable", main_text(source, is_main=False))
        text = f"every rank shows this bar{others}"
        yield source.finding("progress-bar-on-every-rank", "warning", calls[0], text, remedy)


def _shows_bar(source: Source, call: ast.Call) -> bool:
    """A bar that all ranks show, as far as is known."""
    name = source.resolve(call.func)
    if not name.startswith("tqdm.") or name.rpartition(".")[2] not in ("tqdm", "trange"):
        return False
    if argument_of(call, "disable") is not None or any(keyword.arg is None for keyword in call.keywords):
        return False
    guards = guards_of(source.program)
    who = guards.guard(source, call)
    is_shown = (who is None or who.kind == "many") and guards.is_called(source, call) and _is_of_training(source, call)
    return is_shown and not guards.hangs_on_flag(source, call)


def _is_of_training(source: Source, call: ast.Call) -> bool:
    """It stands in a function that learns, or at the head of a loop that does: not the bar of a download."""
    training = training_of(source.program)
    if source.function_of(call) in training.learning:
        return True
    return any(
        isinstance(loop, ast.For | ast.While) and training.learns_in(source, loop) for loop in source.ancestors(call)
    )
