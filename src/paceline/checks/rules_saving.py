"""Who writes checkpoints, and where they are read to."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from paceline.checks.findings import Finding, check
from paceline.checks.guards import Who, guards_of
from paceline.checks.program import Program
from paceline.checks.source import Source, argument_of, last_word
from paceline.checks.training import is_one_process_only, main_text, rank_text, training_of

_SAVES = {"torch.save": 1, "torch.jit.save": 1, "safetensors.torch.save_file": 1, "safetensors.torch.save_model": 1}
"""With the position of the path."""
_ONE_OF_A_KIND = {"BytesIO", "NamedTemporaryFile", "TemporaryFile", "mkstemp", "uuid4", "getpid", "gethostname"}
_OWN_SAVING = {"lightning", "transformers", "paceline", "other"}
"""Frameworks that write, or guard, checkpoints themselves."""
_CHECKPOINT = re.compile(
    r"ckpt|check_?point|resume|snapshot|model|weight|pretrain|state_dict|best|restore|load_from|\.pth", re.I
)


def _saves(source: Source) -> Iterator[tuple[ast.Call, ast.expr | None]]:
    """The calls that write a file of weights, with its path."""
    for call in source.find(ast.Call):
        name = source.resolve(call.func)
        if name in _SAVES:
            yield call, argument_of(call, "f", _SAVES[name])
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "save_pretrained":
            yield call, argument_of(call, "save_directory", 0)


def _is_own_file(source: Source, path: ast.expr | None) -> bool:
    """The path names the rank, so that no two write the same file; or it is no file at all."""
    if path is None:
        return False
    guards = guards_of(source.program)
    for home, origin in [(source, path), *source.program.origins(source, path)]:
        for part in ast.walk(origin):
            if isinstance(part, ast.Call) and last_word(part) in _ONE_OF_A_KIND:
                return True
            if isinstance(part, ast.Name | ast.Attribute) and last_word(part).endswith("rank"):
                return True  # of a group
            if isinstance(part, ast.Name | ast.Attribute | ast.Call | ast.Subscript) and guards.rank_scope(home, part):
                return True
    return False


def _is_of_dataset(source: Source, call: ast.Call) -> bool:
    """A dataset that keeps what it has computed, one file for each sample."""
    around = source.class_of(call)
    return around is not None and any(getattr(node, "name", "") == "__getitem__" for node in around.body)


def _writers(source: Source) -> Iterator[tuple[ast.Call, Who | None]]:
    """The calls that several ranks might run, with who runs them."""
    training = training_of(source.program)
    if not training.is_distributed or training.frameworks & _OWN_SAVING:
        return
    guards = guards_of(source.program)
    for call, path in _saves(source):
        is_guarded = argument_of(call, "is_main_process") is not None or _is_of_dataset(source, call)
        if not is_guarded and not _is_own_file(source, path) and guards.is_called(source, call):
            yield call, guards.guard(source, call)


@check("save-on-every-rank")
def find_save_on_every_rank(source: Source) -> Iterator[Finding]:
    """Only one rank writes a checkpoint.

    What it looks at
        `torch.save`, safetensors and `save_pretrained`, where no condition on the rank stands before them or before the
        calls of the function around them, and where the path does not name the rank.

    Why it matters
        Several ranks write the same file at the same time, which damages it: on one host always, with shared storage
        among hosts, too.

    How to mend it
        Let rank 0 write.
    """
    for call, who in _writers(source):
        if (who is not None and who.kind != "many") or guards_of(source.program).hangs_on_flag(source, call):
            continue
        text = f"every rank runs {ast.unparse(call.func)}, to the same file"
        remedy = source.only_if(main_text(source), call)
        yield source.finding("save-on-every-rank", "warning", call, text, remedy)


@check("save-on-each-host")
def find_save_on_each_host(source: Source) -> Iterator[Finding]:
    """Only one rank of the whole run writes a checkpoint, not one of each host.

    What it looks at
        The same calls as `save-on-every-rank`, where the condition is about the rank on the host: `local_rank == 0`.

    Why it matters
        There is a local rank 0 on every host. On shared storage all of them write the same file at the same time; on
        separate disks each host has a copy, and only one of them is looked at.

    How to mend it
        Ask for the rank in the run. What every rank loads when it resumes must then be on a disk that all hosts share,
        or be copied to them.
    """
    seen: set[ast.expr] = set()
    for _, who in _writers(source):
        if who is None or who.kind != "one" or who.scope != "host" or who.where is None or who.where.node in seen:
            continue
        home, node = who.where
        seen.add(node)
        # Else it is a call that asks for the main process.
        is_number = guards_of(source.program).rank_scope(home, node) is not None
        found = "0" if is_number else "true"
        text = f"{ast.unparse(node)} is {found} once on every host, and all of these write the same file"
        remedy = home.replaced((node, rank_text(home) if is_number else f"({rank_text(home)} == 0)"))
        if _reads_on_every_rank(source.program):
            remedy = f"{remedy}  # and to a disk that all hosts share, or copied to them, if every rank loads it again"
        yield home.finding("save-on-each-host", "warning", node, text, remedy)


@functools.lru_cache(maxsize=1)
def _reads_on_every_rank(program: Program) -> bool:
    """Some file is loaded without a condition on the rank."""
    guards = guards_of(program)
    for source in program.sources:
        for call in source.find(ast.Call):
            if source.resolve(call.func) == "torch.load" and call in source.live:
                who = guards.own_guard(source, call)
                if who is None or who.kind == "many":
                    return True
    return False


@check("load-without-map-location")
def find_load_without_map_location(source: Source) -> Iterator[Finding]:
    """Checkpoints are read to the CPU, or to the rank's own GPU.

    What it looks at
        `torch.load` of a checkpoint without `map_location`, in distributed scripts.

    Why it matters
        Tensors come back to the GPU that they were saved from. All ranks of a host then have a copy on GPU 0, which
        runs out of memory.

    How to mend it
        Read to the CPU: `load_state_dict` copies to where the model is.
    """
    if not training_of(source.program).is_distributed:
        return
    for call in source.find(ast.Call):
        if source.resolve(call.func) != "torch.load" or argument_of(call, "map_location", 1) is not None:
            continue
        statement = ast.unparse(source.statement_of(call)).partition("\n")[0]
        who = guards_of(source.program).guard(source, call)
        is_alone = who is not None and who.kind == "one"
        if any(keyword.arg in (None, "mmap") for keyword in call.keywords) or not _CHECKPOINT.search(statement):
            continue
        if _is_own_file(source, argument_of(call, "f", 0)):
            continue
        if not is_alone and not is_one_process_only(source, call):
            text = "the tensors go to the GPU that they were saved from, for all ranks of a host the same one"
            remedy = source.with_keyword(call, "map_location", "'cpu'")
            yield source.finding("load-without-map-location", "warning", call, text, remedy)
