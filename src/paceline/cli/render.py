"""What `paceline run` shows of its own: before the first rank, and after the last. Pure: text out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.launch.environment import rank_environments, secret_names
from paceline.launch.prepare import Prepared
from paceline.launch.run import Result
from paceline.launch.supervisor import Failure
from paceline.watch.fold import RunView
from paceline.watch.terminal import checkpoint_path, render_summary, rule

_MOST_FAILURES = 6


def prefixes(prepared: Prepared) -> list[str]:
    """`[alice:0]` for each rank."""
    hosts = prepared.plan.hosts
    return [f"[{hosts[host].name}:{rank}]" for rank, host in prepared.plan.host_of_ranks().items()]


def opening(prepared: Prepared, width: int) -> list[str]:
    """What was decided, in a few lines; --dry-run tells it all."""
    plan = prepared.plan
    hosts = ", ".join(f"{host.name}:{host.slots}" if host.slots > 1 else host.name for host in plan.hosts)
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    torch = prepared.facts[0].torch_version
    title = f"{ranks} on {hosts}" + (f" · torch {torch}" if torch else "")
    return [rule(title, width), *(f"  {reason.what:<10}  {reason.why}" for reason in prepared.summary)]


def closing(result: Result, view: RunView, width: int, explained: Sequence[str] = ()) -> Iterator[str]:
    """The summary of a run that went well, or what went wrong, the cause last. `explained`: what its logs show."""
    outcome = result.outcome
    if result.log_problem is not None:
        yield f"paceline: the log files are not complete: {result.log_problem}"
    if outcome.interrupted_by is None and not outcome.failures:
        yield from render_summary(view, duration_s=result.duration_s, log_folder=str(result.folder), width=width)
        return
    if not outcome.failures:
        yield rule("stopped", width)
        yield from _checkpoint_lines(view)
        yield f"  logs        {result.folder}"
        return
    yield from _failure_lines(result, view, width, explained)


def _failure_lines(result: Result, view: RunView, width: int, explained: Sequence[str]) -> Iterator[str]:
    cause, *others = result.outcome.failures
    yield rule("failed", width)
    for failure in others[:_MOST_FAILURES]:
        because = " (most likely because another rank died)" if failure.is_consequence else ""
        if failure.traceback and failure.traceback == cause.traceback:
            because = " (the same traceback)"
        yield f"  then {_who(result, failure)}: {failure.what}{because}"
    if len(others) > _MOST_FAILURES:
        yield f"  and {len(others) - _MOST_FAILURES} more"
    yield from _checkpoint_lines(view)
    yield f"  logs        {result.folder}"
    if cause.traceback:
        yield ""
        yield cause.traceback.rstrip("\n")
        yield ""
    elif cause.rank is not None and result.log_paths[cause.rank].exists():
        yield f"  its stderr  {result.log_paths[cause.rank]}"
    yield from explained
    yield f"paceline: {cause.what if cause.names_ranks else f'{_who(result, cause)} failed first: {cause.what}'}"


def _checkpoint_lines(view: RunView) -> Iterator[str]:
    if view.checkpoint is not None:
        yield f"  checkpoint  {checkpoint_path(view)} (step {view.checkpoint.step})"


def _who(result: Result, failure: Failure) -> str:
    host = result.prepared.plan.hosts[failure.host].name
    return f"host {host}" if failure.rank is None else f"rank {failure.rank} on {host}"


def plan_text(prepared: Prepared) -> str:
    """--dry-run for people."""
    lines = [f"{reason.what}: {reason.why}" for reason in prepared.reasons]
    for record in _plan_records(prepared):
        lines += ["", f"rank {record['rank']} on {record['host']}, in {record['cwd']}"]
        lines.append("  " + " ".join(json.dumps(word) if " " in word else word for word in record["command"]))
        lines += [f"  {name}={value}" for name, value in record["env"].items()]
    return "\n".join(lines)


def plan_json(prepared: Prepared) -> str:
    """--dry-run for programs."""
    reasons = [{"what": reason.what, "why": reason.why} for reason in prepared.reasons]
    return json.dumps({"reasons": reasons, "ranks": _plan_records(prepared)}, indent=2)


def _plan_records(prepared: Prepared) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for index, host in enumerate(prepared.plan.hosts):
        for env in rank_environments(prepared.plan, index, port=0, attempt=0):
            env["MASTER_PORT"] = host.env.get("MASTER_PORT", "(a free one, picked at the start)")
            hidden = dict.fromkeys(secret_names(list(host.env)), "(hidden)")
            records.append(
                {
                    "rank": int(env["RANK"]),
                    "host": host.name,
                    "cwd": host.cwd,
                    "command": prepared.commands[index],
                    "env": {**env, **hidden},
                }
            )
    return records
