"""The order of what is done with gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.checks.findings import Finding, check
from paceline.checks.source import Source
from paceline.checks.training import training_of

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
_OWN_SCALING = {"accelerate", "lightning", "deepspeed", "transformers", "paceline"}


@check("clip-before-unscale")
def find_clip_before_unscale(source: Source) -> Iterator[Finding]:
    """Gradients are unscaled before they are clipped.

    What it looks at
        `clip_grad_norm_` and `clip_grad_value_` between `scaler.scale(loss).backward()` and `scaler.step(optimizer)`,
        without `scaler.unscale_(optimizer)` before.

    Why it matters
        The gradients are still thousands of times too large, so that clipping reduces every step to almost nothing.

    How to mend it
        Call `scaler.unscale_` for the optimizer first.
    """
    if training_of(source.program).frameworks & _OWN_SCALING:
        return
    for clip in source.find(ast.Call):
        if not isinstance(clip.func, ast.Name | ast.Attribute) or not ast.unparse(clip.func).endswith(_CLIPS):
            continue
        function = source.function_of(clip)
        around = [node for node in ast.walk(function or source.tree) if isinstance(node, ast.Call)]
        around = [call for call in around if source.function_of(call) is function]
        backward = next(
            (call for call in around if _is_scaled_backward(call) and _comes_before(source, call, clip)), None
        )
        step = next(
            (call for call in around if _is_method(call, "step") and call.args and call.lineno > clip.lineno), None
        )
        if backward is None or step is None or not isinstance(step.func, ast.Attribute):
            continue
        if any(_is_method(call, "unscale_") and call.lineno <= clip.lineno for call in around):
            continue
        scaler, optimizer = ast.unparse(step.func.value), ast.unparse(step.args[0])
        text = f"the gradients are clipped while they are still multiplied by {scaler}'s scale"
        remedy = f"{scaler}.unscale_({optimizer}); {ast.unparse(source.statement_of(clip))}"
        yield source.finding("clip-before-unscale", "warning", clip, text, remedy)


def _is_method(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == name


def _is_scaled_backward(call: ast.Call) -> bool:
    """`scaler.scale(loss).backward()`"""
    return (
        _is_method(call, "backward")
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Call)
        and _is_method(call.func.value, "scale")
    )


def _comes_before(source: Source, first: ast.Call, second: ast.Call) -> bool:
    """By its line, and not in the other branch of an `if`."""
    if first.lineno >= second.lineno:
        return False
    above = dict(_steps_up(source, second))
    for parent, child in _steps_up(source, first):
        if parent in above:
            is_branching = isinstance(parent, ast.If)
            return not (is_branching and (child in parent.body) != (above[parent] in parent.body))
    return True


def _steps_up(source: Source, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    child = node
    for parent in source.ancestors(node):
        yield parent, child
        child = parent


@check("no-sync-around-backward-only")
def find_no_sync_around_backward_only(source: Source) -> Iterator[Finding]:
    """`no_sync()` holds the forward pass, too.

    What it looks at
        `with model.no_sync():` around a `backward()` whose loss was computed before; and `require_backward_grad_sync`
        set between the two.

    Why it matters
        DistributedDataParallel decides in the forward pass whether the next backward pass exchanges gradients. So
        they are exchanged every time, which is what `no_sync` should save; or not in the last one, which is worse.

    How to mend it
        Let the `with` begin before the forward pass.
    """
    for block in source.find(ast.With):
        synced = next((item for item in block.items if "no_sync" in ast.unparse(item.context_expr)), None)
        training = training_of(source.program)
        if synced is None or training.frameworks & _OWN_SCALING or training.wrappers == {"fsdp"}:
            continue  # a sharded model asks in the backward pass
        inside = [node for statement in block.body for node in ast.walk(statement)]
        assigned = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for call in inside:
            if isinstance(call, ast.Call) and _is_method(call, "backward"):
                names = {node.id for node in ast.walk(call.func) if isinstance(node, ast.Name)}
                losses = {name for name in names if "loss" in name and "scaler" not in name}
                if losses and not losses & assigned and not _runs_model(source, inside, synced):
                    text = "the forward pass is outside of no_sync(), so that the gradients are exchanged all the same"
                    loss = sorted(losses)[0]
                    remedy = f"with {ast.unparse(synced.context_expr)}:  # above the line that computes {loss}"
                    yield source.finding("no-sync-around-backward-only", "warning", block, text, remedy)
                    break
    yield from _find_late_flag(source)


def _runs_model(source: Source, inside: list[ast.AST], synced: ast.withitem) -> bool:
    """The model is called there."""
    model = ast.unparse(synced.context_expr).partition(".no_sync")[0].rpartition(" ")[2]
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) == model for node in inside)


def _find_late_flag(source: Source) -> Iterator[Finding]:
    """`model.require_backward_grad_sync = …` between the model's call and the backward pass."""
    for statement in source.find(ast.Assign):
        target = statement.targets[0]
        if not isinstance(target, ast.Attribute) or target.attr != "require_backward_grad_sync":
            continue
        parent = source.parents[statement]
        step = parent if isinstance(parent, ast.If) else statement  # `if ddp:` around it
        block = source.block_of(step)
        model = ast.unparse(target.value)
        earlier = [node for one in block[: block.index(step)] for node in ast.walk(one)]
        later = [node for one in block[block.index(step) :] for node in ast.walk(one)]
        is_late = any(isinstance(node, ast.Call) and ast.unparse(node.func) == model for node in earlier)
        if is_late and any(isinstance(node, ast.Call) and _is_method(node, "backward") for node in later):
            text = "the forward pass has already decided whether gradients are exchanged"
            remedy = f"{ast.unparse(statement)}  # above the call of {model}"
            yield source.finding("no-sync-around-backward-only", "warning", statement, text, remedy)
