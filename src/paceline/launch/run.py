"""A run from beginning to end: prepare the hosts, then perform what the supervisor asks for until it says Finish."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline import events
from paceline.errors import HostError
from paceline.launch import protocol, stalls, supervisor
from paceline.launch.environment import rank_environments
from paceline.launch.facts import state_folder
from paceline.launch.hosts import HOST_SILENCE_LIMIT_S, Hosts, open_hosts
from paceline.launch.logs import RankLogs, Screen
from paceline.launch.options import RunOptions
from paceline.launch.prepare import Look, Prepared, new_run_id, prepare
from paceline.launch.signals import signals_into
from paceline.launch.transport import Closed, Received, Signalled

_TICK_S = 0.2
_PAUSE_S = 2.0
"""A driver that did nothing for so long was stopped (or its machine slept): its hosts have not been silent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How a run went, for whoever draws it."""

    outcome: supervisor.Outcome
    prepared: Prepared
    folder: Path
    log_paths: Mapping[int, Path]
    """The stderr file of each rank, in its last attempt."""
    duration_s: float
    log_problem: str | None


def dry_run(options: RunOptions, look: Look) -> Prepared:
    """Everything that a run would decide. The agents run for it, but nothing of the project is copied or started."""
    with signals_into(queue.SimpleQueue()) as inbox, open_hosts(options.hosts, inbox) as hosts:
        return prepare(hosts, options, _run_id(), look, dry_run=True)


def run(
    options: RunOptions,
    make_screen: Callable[[Prepared], Screen],
    on_event: Callable[[events.Event, int | None], None],
    look: Look,
) -> Result:
    """Run it. Raises HostError or InputError when it can't start; what happens later is in the result."""
    run_id = _run_id()
    with signals_into(queue.SimpleQueue()) as inbox, open_hosts(options.hosts, inbox) as hosts:
        prepared = prepare(hosts, options, run_id, look, dry_run=False)
        folder = make_run_folder(run_id)
        with EventLog(folder / "events.jsonl", on_event) as log:
            conductor = _Conductor(hosts, prepared, options, folder, make_screen(prepared), log)
            return conductor.conduct()


def _run_id() -> str:
    return new_run_id(time.strftime("%Y%m%d-%H%M%S"))


def make_run_folder(run_id: str) -> Path:
    """The run's folder on the driver's machine. Raises HostError where none can be made."""
    folder = Path(state_folder()) / "runs" / run_id
    try:
        folder.mkdir(parents=True, mode=0o700)
        (folder / "events.jsonl").touch()
    except OSError as error:
        raise HostError(
            f"this machine: cannot make the run's folder {folder}: {error.strerror}",
            hint="make room there, or set XDG_STATE_HOME to another folder",
        ) from error
    return folder


class EventLog:
    """Every event, as a line of `events.jsonl` and as a call."""

    def __init__(self, path: Path, on_event: Callable[[events.Event, int | None], None]) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed by __exit__
        self._on_event = on_event

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def add(self, event: events.Event, rank: int | None = None) -> None:
        """Something happened; `rank` is the rank that said so."""
        self._write(events.to_record(event), rank)
        self._on_event(event, rank)

    def add_record(self, record: dict[str, Any], rank: int) -> None:
        """A record that a rank sent; kept even where this version does not know it."""
        self._write(record, rank)
        event = events.from_record(record)
        if event is not None:
            self._on_event(event, rank)

    def _write(self, record: Mapping[str, Any], rank: int | None) -> None:
        entry = {"at": round(time.time(), 3), **({"rank": rank} if rank is not None else {}), **record}
        with contextlib.suppress(OSError):  # a full disk must not end the run
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()


class _Conductor:
    """Turns what arrives into the supervisor's events, and performs the actions that it asks for."""

    def __init__(
        self,
        hosts: Hosts,
        prepared: Prepared,
        options: RunOptions,
        folder: Path,
        screen: Screen,
        log: EventLog,
    ) -> None:
        self._hosts = hosts
        self._prepared = prepared
        self._options = options
        self._folder = folder
        self._screen = screen
        self._log = log
        self._logs = RankLogs(folder, screen)
        self._rank_hosts = prepared.plan.host_of_ranks()
        self._state = supervisor.new_state(self._rank_hosts, grace_s=options.grace_s, restarts=options.restarts)
        self._stalls = stalls.Stalls(hosts=self._names_of_ranks())
        self._outcome: supervisor.Outcome | None = None
        self._attempt = 0
        now = time.monotonic()
        self._started_s = now
        self._last_look_s = now

    def conduct(self) -> Result:
        names = tuple(host.name for host in self._prepared.plan.hosts)
        command = (self._options.target, *self._options.arguments)
        plan = self._prepared.plan
        self._log.add(events.RunStarted(run_id=plan.run_id, command=command, hosts=names, num_ranks=plan.num_ranks))
        self._tell(supervisor.Begin())
        while self._outcome is None:
            with contextlib.suppress(queue.Empty):
                self._receive(self._hosts.inbox.get(timeout=_TICK_S))
            # By the clock, not when the inbox is empty: ranks that print all the time must not hide a silent host.
            if time.monotonic() - self._last_look_s >= _TICK_S:
                self._look_for_silence()
                self._explain_stalls()
                self._tell(supervisor.Tick())
                self._last_look_s = time.monotonic()
        self._logs.close()
        headline = self._outcome.failures[0].what if self._outcome.failures else ""
        self._log.add(events.RunEnded(exit_code=self._outcome.exit_code, headline=headline))
        return Result(
            outcome=self._outcome,
            prepared=self._prepared,
            folder=self._folder,
            log_paths={rank: self._logs.path(rank, "stderr") for rank in self._rank_hosts},
            duration_s=time.monotonic() - self._started_s,
            log_problem=self._logs.problem,
        )

    # What arrives

    def _receive(self, item: Received | Closed | Signalled) -> None:
        match item:
            case Signalled():
                self._tell(supervisor.Interrupted(number=item.number))
            case Closed():
                self._tell(supervisor.HostGone(host=item.host_index, reason=item.reason.message))
            case Received():
                self._on_message(item.host_index, item.message, item.payload)

    def _on_message(self, host: int, message: protocol.Message, payload: bytes) -> None:
        match message:
            case protocol.Output(rank=number) | protocol.RankEnded(rank=number) if number < 0:
                return  # an errand of the look before the run, which was given up
            case protocol.Output():
                self._logs.feed(message.rank, message.stream, payload)
            case protocol.RankSaid():
                self._on_word(message)
            case protocol.RankBegan():
                name = self._prepared.plan.hosts[host].name
                self._log.add(events.RankStarted(rank=message.rank, host=name, pid=message.pid, attempt=self._attempt))
            case protocol.RankEnded():
                self._on_rank_ended(host, message)
            case protocol.AllStopped():
                self._tell(supervisor.HostStopped(host=host))
            case protocol.PortHeld():
                asked = self._asked_port()
                problem = f"port {asked}, asked for with MASTER_PORT, can't be had: {message.holder}"
                self._tell(supervisor.PortPicked(port=message.port, problem=problem))
            case protocol.Problem():
                text = f"{message.message}\n  {message.hint}" if message.hint else message.message
                self._tell(supervisor.HostProblem(host=host, problem=text))
            case _:
                return

    def _on_word(self, message: protocol.RankSaid) -> None:
        self._log.add_record(message.record, message.rank)
        event = events.from_record(message.record)
        if isinstance(event, events.RankRaised):
            self._logs.store(message.rank, "stderr", event.traceback)
            self._tell(supervisor.Raised(rank=message.rank, summary=event.summary, traceback=event.traceback))
        elif isinstance(event, events.RankFinished):
            self._tell(supervisor.Finished(rank=message.rank))
            self._stalls = stalls.end(self._stalls, message.rank, event.steps, time.monotonic())
        elif isinstance(event, events.RankStalled):
            self._stalls = stalls.stall(self._stalls, message.rank, event, time.monotonic())
        elif isinstance(event, events.RankMoved):
            self._stalls, lines = stalls.move(self._stalls, message.rank, time.monotonic())
            self._say_of_stalls(lines)

    def _on_rank_ended(self, host: int, message: protocol.RankEnded) -> None:
        self._logs.end(message.rank)
        name = self._prepared.plan.hosts[host].name
        self._log.add(
            events.RankExited(rank=message.rank, host=name, exit_code=message.exit_code, attempt=self._attempt)
        )
        self._tell(
            supervisor.Ended(
                rank=message.rank,
                exit_code=message.exit_code,
                at_s=message.at_s + self._hosts.clock_offset_s[host],
                kernel_says=message.kernel_says,
            )
        )

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        paused = now - self._last_look_s > _PAUSE_S
        for host, channel in enumerate(self._hosts.channels):
            if paused:
                channel.heard_at_s = now
            if now - channel.heard_at_s > HOST_SILENCE_LIMIT_S:
                reason = (
                    f"{self._prepared.plan.hosts[host].name} has not been heard for {HOST_SILENCE_LIMIT_S:.0f} s "
                    "(machine down, cable, or network); it ends its ranks by itself"
                )
                self._tell(supervisor.HostGone(host=host, reason=reason))

    def _explain_stalls(self) -> None:
        self._stalls, lines = stalls.speak(self._stalls, time.monotonic())
        self._say_of_stalls(lines)

    def _say_of_stalls(self, lines: list[str]) -> None:
        if lines and self._state.phase == "running":  # ranks that are being ended stand still, too
            self._screen.say("paceline: " + "\n".join(lines))

    def _names_of_ranks(self) -> tuple[str, ...]:
        return tuple(self._prepared.plan.hosts[host].name for host in self._rank_hosts.values())

    # What is asked for

    def _tell(self, event: supervisor.Event) -> None:
        self._state, actions = supervisor.step(self._state, event, time.monotonic())
        for action in actions:
            self._perform(action)

    def _perform(self, action: supervisor.Action) -> None:
        match action:
            case supervisor.PickPort():
                self._hosts.channels[0].send(protocol.HoldPort(port=self._asked_port()))
            case supervisor.StartAll():
                self._start_all(action)
            case supervisor.StopHost():
                self._hosts.channels[action.host].send(protocol.StopRanks(grace_s=action.grace_s))
            case supervisor.GiveUp():
                name = self._prepared.plan.hosts[action.host].name
                self._screen.say(f"paceline: {name} has not confirmed that all is ended there; its lease will end it")
            case supervisor.Say():
                self._screen.say(f"paceline: {action.text}")
            case supervisor.Finish():
                self._outcome = action.outcome

    def _start_all(self, action: supervisor.StartAll) -> None:
        self._attempt = action.attempt
        self._stalls = stalls.Stalls(hosts=self._names_of_ranks())
        self._logs.begin_attempt(action.attempt)
        plan = self._prepared.plan
        for index, host in enumerate(plan.hosts):
            environments = rank_environments(plan, index, port=action.port, attempt=action.attempt)
            ranks = [
                {
                    "rank": int(env["RANK"]),
                    "argv": self._prepared.commands[index],
                    "env": env,
                    "cwd": host.cwd,
                }
                for env in environments
            ]
            self._hosts.channels[index].send(protocol.StartRanks(ranks=ranks))

    def _asked_port(self) -> int:
        asked = self._prepared.plan.hosts[0].env.get("MASTER_PORT", "0")
        return int(asked) if asked.isascii() and asked.isdigit() else 0
