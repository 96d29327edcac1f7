"""Real runs on this machine, without torch: what the user sees, what happens when things die; and nothing stays."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from local_runs import DOWN_LIMIT_S, PACELINE, Run, run, start, state_of, wait_until

pytestmark = pytest.mark.launcher

TWO = ("-H", "localhost:2")
FOUR = ("-H", "localhost:4")
SLEEPS = "import time; print('up'); time.sleep(100)"


def is_there(pid: int) -> bool:
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


# What a run looks like


def test_success(tmp_path: Path) -> None:
    script = """
        import os, sys
        print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], repr(sys.stdin.read()))
        print("no end", end="", file=sys.stderr)
    """
    ended = run(tmp_path, *TWO, "train.py", "--epochs", "3", "-m", script=script)
    assert ended.process.returncode == 0, ended.err
    assert sorted(ended.out.splitlines()) == [
        "[localhost:0] rank 0 of 2 ['--epochs', '3', '-m'] ''",
        "[localhost:1] rank 1 of 2 ['--epochs', '3', '-m'] ''",
    ]
    lines = ended.err.splitlines()
    assert lines[0].startswith("─ paceline ─ 2 ranks on localhost:2")
    assert {"[localhost:0] no end", "[localhost:1] no end"} <= set(lines)
    assert lines[-1] == f"  logs        {ended.run_folder}"
    assert (ended.run_folder / "rank-1.stdout.log").read_text() == "rank 1 of 2 ['--epochs', '3', '-m'] ''\n"
    assert (ended.run_folder / "rank-1.stderr.log").read_text() == "no end"
    assert ended.run_folder.stat().st_mode & 0o077 == 0, "what a run prints is nobody else's business"
    kinds = [event["kind"] for event in ended.events()]
    assert kinds[0] == "run_started" and kinds[-1] == "run_ended"
    assert sorted(kinds[1:-1]) == sorted(["rank_started", "rank_finished", "rank_exited"] * 2)


def test_a_look_that_is_given_up_is_none_of_the_ranks(tmp_path: Path) -> None:
    """Its processes end while ranks run, and their ends and words must not be taken for a rank's."""
    (tmp_path / "train.py").write_text("import time; time.sleep(1.5); print('trained')")
    hurry = "import paceline.checks.host_states as p; p.QUICK_LIMIT_S = 0.0; from paceline.cli import main; main()"
    command = [sys.executable, "-c", hurry, "run", *TWO, "train.py"]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=40)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[localhost:0] trained", "[localhost:1] trained"]


def test_an_exit_code_names_the_rank(tmp_path: Path) -> None:
    script = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(100)"
    ended = run(tmp_path, *TWO, "train.py", script=script)
    assert ended.process.returncode == 1
    assert ended.last_line == "paceline: rank 1 on localhost failed first: exit code 7"
    assert ended.events()[-1]["headline"] == "exit code 7"


def test_a_traceback_that_all_ranks_share_is_shown_once_and_last(tmp_path: Path) -> None:
    script = """
        def boom():
            raise ValueError("no such data")
        boom()
    """
    ended = run(tmp_path, *FOUR, "train.py", script=script)
    assert ended.process.returncode == 1
    assert ended.err.count("Traceback") == 1 and "Traceback" not in ended.out
    assert ended.last_line.startswith("paceline: rank ")
    assert ended.last_line.endswith(" on localhost failed first: exit code 1: ValueError: no such data")
    before = ended.err.splitlines()[-8:-2]
    assert before == [
        "Traceback (most recent call last):",
        '  File "train.py", line 4, in <module>',
        "    boom()",
        '  File "train.py", line 3, in boom',
        '    raise ValueError("no such data")',
        "ValueError: no such data",
    ]
    first = ended.last_line.split()[2]
    logs = {path.name: path.read_text() for path in ended.run_folder.glob("rank-*.stderr.log")}
    assert f"rank-{first}.stderr.log" in logs, "a rank that was ended before it failed may have none"
    assert all(log.endswith("ValueError: no such data\n") for log in logs.values()), "each rank's file has its own"


def test_the_cause_is_the_headline_though_another_rank_ended_sooner(tmp_path: Path) -> None:
    script = """
        import os, signal, threading, time
        if os.environ["RANK"] == "0":
            time.sleep(100)
        if os.environ["RANK"] == "1":
            while not os.path.exists("failing"):
                time.sleep(0.01)
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:9")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=time.sleep, args=(0.5,)).start()  # its process ends later
        open("failing", "w").close()
        raise KeyError("the cause")
    """
    ended = run(tmp_path, "-H", "localhost:3", "train.py", script=script)
    assert ended.last_line == "paceline: rank 2 on localhost failed first: exit code 1: KeyError: 'the cause'"
    assert "then rank 1 on localhost: exit code 1: RuntimeError" in ended.err
    assert "(most likely because another rank died)" in ended.err


def test_output_of_four_ranks_is_whole_and_untorn(tmp_path: Path) -> None:
    script = """
        import os, sys
        rank = os.environ["RANK"]
        for number in range(8000):
            sys.stdout.write(f"{rank}:{number}:" + "ü" * 70 + "\\n")
    """
    ended = run(tmp_path, *FOUR, "train.py", script=script)
    assert ended.process.returncode == 0
    by_rank: dict[str, list[str]] = {}
    for line in ended.out.splitlines():
        prefix, _, text = line.partition(" ")
        by_rank.setdefault(prefix, []).append(text)
    assert len(ended.out.encode()) > 5_000_000
    for rank in range(4):
        expected = [f"{rank}:{number}:{'ü' * 70}" for number in range(8000)]
        assert by_rank[f"[localhost:{rank}]"] == expected
        assert (ended.run_folder / f"rank-{rank}.stdout.log").read_text().splitlines() == expected


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("for i in range(20000): print(i)\nopen('done', 'w').close()\n")
    line = f"{PACELINE} run train.py | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(state_of(tmp_path))},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.splitlines() == ["[localhost:0] 0", "0"]
    assert (tmp_path / "done").exists()
    assert "Traceback" not in done.stderr


def test_a_slow_reader_slows_the_rank_down_and_is_no_lost_host(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("for number in range(400_000): print('x' * 60, number)")
    env = {**os.environ, "XDG_STATE_HOME": str(state_of(tmp_path))}
    process = subprocess.Popen([PACELINE, "run", "train.py"], cwd=tmp_path, env=env, stdout=-1, stderr=-1)
    with process:
        assert process.stdout is not None and process.stderr is not None
        began, num_bytes = time.monotonic(), 0
        while data := os.read(process.stdout.fileno(), 1 << 16):
            num_bytes += len(data)
            if time.monotonic() - began < 10:  # longer than a silent host is waited for
                time.sleep(0.1)
        assert process.wait(20) == 0, process.stderr.read()
    assert num_bytes > 400_000 * 60


def test_orphans_that_end_are_reaped_while_the_run_goes_on(tmp_path: Path) -> None:
    script = """
        import os, time
        for _ in range(20):
            os.system("true &")
        time.sleep(0.5)
        print("zombies", os.popen("ps -eo stat= | grep -c ^Z").read().strip(), flush=True)
        print(open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split())
    """
    ended = run(tmp_path, "train.py", script=script)
    children = ended.out.splitlines()[1]
    assert children.count(",") <= 2, ended.out  # the watchdog and the rank itself


def test_a_closed_stdin_is_no_stdin(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(repr(sys.stdin.read()))\n")
    done = subprocess.run(
        ["sh", "-c", f"exec {PACELINE} run train.py <&-"],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(state_of(tmp_path))},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, "[localhost:0] ''\n"), done.stderr


# Ways to say what to run


def test_a_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text("import sys\nfrom . import __name__ as n\nprint(n, sys.argv[1:])\n")
    ended = run(tmp_path, "-m", "package.train", "--lr", "1", "-H", "x")
    assert (ended.process.returncode, ended.out) == (0, "[localhost:0] package ['--lr', '1', '-H', 'x']\n"), ended.err


def test_a_command(tmp_path: Path) -> None:
    ended = run(tmp_path, *TWO, "--env", "WORD=hi there", "--", "sh", "-c", 'echo "$WORD $RANK" $0 --', "-x")
    assert ended.process.returncode == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["[localhost:0] hi there 0 -x --", "[localhost:1] hi there 1 -x --"]


def test_variables(tmp_path: Path) -> None:
    script = "import os; print(os.environ['FROM_HERE'], os.environ['GIVEN'], os.environ['OMP_NUM_THREADS'])"
    words = ("--env", "FROM_HERE", "--env", "GIVEN=a=b", "--env", "OMP_NUM_THREADS=3")
    ended = run(tmp_path, *words, "train.py", script=script, FROM_HERE="here")
    assert ended.out == "[localhost:0] here a=b 3\n", ended.err


def test_a_dry_run_starts_nothing_and_says_everything(tmp_path: Path) -> None:
    script = "open('started', 'w').close()"
    ended = run(tmp_path, *TWO, "--dry-run", "--json", "--env", "MY_TOKEN=hush", "train.py", "--x", script=script)
    plan = json.loads(ended.out)
    assert [rank["env"]["RANK"] for rank in plan["ranks"]] == ["0", "1"]
    assert plan["ranks"][0]["command"][-3:] == ["script", "train.py", "--x"]
    assert {"what": "hosts", "why": "from -H"} in plan["reasons"]
    assert "hush" not in ended.out
    text = run(tmp_path, *TWO, "--dry-run", "train.py").out
    assert "rank 1 on localhost" in text and "hosts: from -H" in text
    assert not (tmp_path / "started").exists()
    assert not (state_of(tmp_path) / "paceline" / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone.py"], "paceline: there is no script gone.py in {folder}"),
        (["--python", "/no/python", "train.py"], "paceline: localhost: there is no Python at /no/python"),
        (["--env", "NOT_SET_HERE", "train.py"], "paceline: --env NOT_SET_HERE: it is not set here"),
        (["--json", "train.py"], "paceline: --json only goes with --dry-run"),
        (["--grace", "nan", "train.py"], "paceline: --grace nan: expected seconds, at most 86400 (a day)"),
        (["--grace", "inf", "train.py"], "paceline: --grace inf: expected seconds, at most 86400 (a day)"),
        (["--env", "WORLD_SIZE=7", "train.py"], "paceline: --env WORLD_SIZE=7: WORLD_SIZE is paceline's to set"),
        (["--env", "MASTER_PORT=²", "train.py"], "paceline: --env MASTER_PORT=²: expected a port from 1 to 65535"),
        (["--", "no-such-command-here"], "paceline: host localhost failed first: No such file or directory"),
    ],
)
def test_mistakes_are_one_message(tmp_path: Path, words: list[str], message: str) -> None:
    ended = run(tmp_path, *words)
    assert ended.process.returncode in (1, 2, 3)
    assert message.format(folder=tmp_path) in ended.err
    assert "Traceback" not in ended.err


def test_an_option_after_the_script_is_noticed(tmp_path: Path) -> None:
    ended = run(tmp_path, "train.py", "-H", "a,b", script="import sys; print(sys.argv[1:])")
    assert ended.process.returncode == 0 and "['-H', 'a,b']" in ended.out
    assert "paceline: note: -H stands after train.py, so it is given to it" in ended.err


# Restarts


def test_restarts_until_it_works(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt)
        if attempt < "2":
            sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(100)
    """
    ended = run(tmp_path, *TWO, "--restarts", "3", "train.py", script=script)
    assert ended.process.returncode == 0, ended.err
    lines = ended.out.splitlines()
    assert [line for line in lines if ":1]" in line] == [f"[localhost:1] attempt {attempt}" for attempt in range(3)]
    assert lines[-1].endswith("attempt 2") and "[localhost:0] attempt 2" in lines
    assert "rank 1 failed (exit code 3); starting all ranks again (restart 1 of 3)" in ended.err
    assert (ended.run_folder / "rank-0.restart-2.stdout.log").read_text() == "attempt 2\n"


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    ended = run(tmp_path, "--restarts", "1", "train.py", script="print('try'); raise SystemExit(3)")
    assert ended.process.returncode == 1
    assert ended.out.count("try") == 2
    assert ended.last_line == "paceline: rank 0 on localhost failed first: exit code 3"


# The end, whoever brings it about


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_one_signal_lets_the_ranks_write_a_checkpoint(tmp_path: Path, number: signal.Signals, exit_code: int) -> None:
    script = """
        import os, signal, sys, time
        def save(number, frame):
            time.sleep(0.3)
            print("saved", signal.Signals(number).name)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("up")
        time.sleep(100)
    """
    with start(tmp_path, *TWO, "train.py", script=script) as running:
        running.wait_for("up", 2)
        running.signal(number)
        assert running.wait(DOWN_LIMIT_S) == exit_code
    assert running.out.count("saved SIGTERM") == 2
    assert f"paceline: {number.name}: stopping all ranks (up to 5 s); once more to stop at once" in running.err


DEAF = """
    import os, signal, subprocess, sys, time
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(100)"
    ways = [{}, {"start_new_session": True}, {"env": {}}, {"env": {}, "start_new_session": True}]
    for index, way in enumerate(ways):
        subprocess.Popen([sys.executable, "-c", code, f"pid.{os.environ['RANK']}.{index}.part"], **way)
    while not all(os.path.exists(f"pid.{os.environ['RANK']}.{index}.part") for index in range(4)):
        time.sleep(0.01)
    print("up")
    time.sleep(100)
"""


def grandchildren(folder: Path) -> list[int]:
    texts = [path.read_text() for path in folder.glob("pid.*.part")]
    return [int(text) for text in texts if text]


def expect_dead(pids: list[int], limit_s: float = DOWN_LIMIT_S) -> None:
    try:
        wait_until(lambda: not any(map(is_there, pids)), limit_s, lambda: [pid for pid in pids if is_there(pid)])
    finally:
        for pid in filter(is_there, pids):
            os.kill(pid, signal.SIGKILL)


def test_a_second_signal_stops_at_once_what_is_deaf(tmp_path: Path) -> None:
    with start(tmp_path, *TWO, "--grace", "100", "train.py", script=DEAF) as running:
        running.wait_for("up", 2)
        wait_until(lambda: len(grandchildren(tmp_path)) == 8, 10)
        running.signal(signal.SIGINT)
        wait_until(lambda: "once more to stop at once" in running.err, 10)
        began = time.monotonic()
        running.signal(signal.SIGINT)
        assert running.wait(DOWN_LIMIT_S) == 130
        assert time.monotonic() - began < 5
        expect_dead(grandchildren(tmp_path))
    assert "stopping at once" in running.err


def test_a_failure_takes_down_deaf_ranks_and_all_that_they_started(tmp_path: Path) -> None:
    script = DEAF + "\n    "
    with start(tmp_path, *TWO, "--grace", "1", "train.py", script=script) as running:
        running.wait_for("up", 2)
        wait_until(lambda: len(grandchildren(tmp_path)) == 8, 10)
        os.kill(running.pid_of_rank(1), signal.SIGKILL)
        assert running.wait(DOWN_LIMIT_S) == 1
        expect_dead(grandchildren(tmp_path))
    assert running.last_line.startswith("paceline: rank 1 on localhost failed first: signal 9 (SIGKILL)")


def test_what_a_successful_rank_left_behind_goes_too(tmp_path: Path) -> None:
    script = DEAF.replace('    print("up")\n    time.sleep(100)\n', "")
    with start(tmp_path, "train.py", script=script) as running:
        assert running.wait() == 0
        expect_dead(grandchildren(tmp_path), limit_s=1)
    assert len(grandchildren(tmp_path)) == 4


def test_the_driver_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, *TWO, "train.py", script=DEAF) as running:
        running.wait_for("up", 2)
        wait_until(lambda: len(grandchildren(tmp_path)) == 8, 10)
        running.signal(signal.SIGKILL)
        running.wait()
        running.expect_all_gone()
        expect_dead(grandchildren(tmp_path))


def test_the_agent_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, *TWO, "train.py", script=SLEEPS) as running:
        running.wait_for("up", 2)
        os.kill(running.pid_of_agent(), signal.SIGKILL)
        assert running.wait(DOWN_LIMIT_S) == 1
        running.expect_all_gone()
    assert running.last_line.startswith("paceline: host localhost failed first: localhost: the agent there has ended")


def test_the_agent_is_killed_and_its_ranks_have_cleared_their_environment(tmp_path: Path) -> None:
    with start(tmp_path, *TWO, "train.py", script=DEAF) as running:
        running.wait_for("up", 2)
        wait_until(lambda: len(grandchildren(tmp_path)) == 8, 10)
        os.kill(running.pid_of_agent(), signal.SIGKILL)
        assert running.wait(DOWN_LIMIT_S) == 1
        # The fourth way, with neither mark nor session, is beyond a watchdog: docs/assumptions.md says so.
        lost = {int((tmp_path / f"pid.{rank}.3.part").read_text()) for rank in range(2)}
        try:
            expect_dead([pid for pid in grandchildren(tmp_path) if pid not in lost])
        finally:
            for pid in lost:
                os.kill(pid, signal.SIGKILL)


def test_lines_of_a_ranks_processes_are_not_torn(tmp_path: Path) -> None:
    script = """
        import multiprocessing
        def work(number):
            for _ in range(300):
                print("process", number, "says", "the same", "again")
        if __name__ == "__main__":
            workers = [multiprocessing.Process(target=work, args=(number,)) for number in range(4)]
            [worker.start() for worker in workers] + [worker.join() for worker in workers]
    """
    ended = run(tmp_path, "train.py", script=script)
    wanted = {f"[localhost:0] process {number} says the same again" for number in range(4)}
    assert set(ended.out.splitlines()) == wanted and len(ended.out.splitlines()) == 1200


@pytest.mark.ranks
def test_ranks_that_train_alone_are_told_so(tmp_path: Path) -> None:
    ended = run(tmp_path, *TWO, "train.py", script="import torch; print(torch.ones(1))")
    assert "note        no rank made a process group" in ended.err
    ended = run(tmp_path, *TWO, "train.py", script="print('nothing to do with PyTorch')")
    assert "process group" not in ended.err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_lead_nowhere(tmp_path: Path, closed: str) -> None:
    (tmp_path / "train.py").write_text("open('trained', 'w').close()")
    command = f"{PACELINE} run train.py {closed}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env={**os.environ, "XDG_STATE_HOME": str(state_of(tmp_path))},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert (tmp_path / "trained").exists()


@pytest.mark.timeout(90)
def test_an_agent_that_is_stopped_does_not_keep_its_ranks(tmp_path: Path) -> None:
    with start(tmp_path, *TWO, "train.py", script=SLEEPS) as running:
        running.wait_for("up", 2)
        ranks, agent = [running.pid_of_rank(rank) for rank in range(2)], running.pid_of_agent()
        os.kill(agent, signal.SIGSTOP)
        try:
            assert running.wait(30) == 1
            expect_dead(ranks, limit_s=30)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the driver kills one that it has started itself
                os.kill(agent, signal.SIGKILL)


def test_a_reader_that_does_not_block_gets_every_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("for number in range(60_000): print('x' * 60, number)")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    env = {**os.environ, "XDG_STATE_HOME": str(state_of(tmp_path))}
    with subprocess.Popen([PACELINE, "run", "train.py"], cwd=tmp_path, env=env, stdout=writer, stderr=-1) as process:
        os.close(writer)
        num_lines = 0
        while data := os.read(reader, 1 << 14):
            num_lines += data.count(b"\n")
            time.sleep(0.001)
        assert process.wait(20) == 0
    os.close(reader)
    assert num_lines == 60_000


def test_driver_and_agent_are_killed_together(tmp_path: Path) -> None:
    with start(tmp_path, *TWO, "train.py", script=SLEEPS) as running:
        running.wait_for("up", 2)
        agent = running.pid_of_agent()
        running.signal(signal.SIGKILL)
        os.kill(agent, signal.SIGKILL)
        running.wait()


def test_a_driver_that_is_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z, or a laptop that sleeps: shorter than the lease, it does no harm."""
    with start(tmp_path, "train.py", script="import time; print('up'); time.sleep(1.5); print('done')") as running:
        running.wait_for("up")
        running.signal(signal.SIGTSTP)  # ignored
        running.signal(signal.SIGSTOP)
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 0.5, 5)
        running.signal(signal.SIGCONT)
        assert running.wait() == 0
    assert running.out.endswith("done\n")


def test_a_closed_terminal_ends_the_run_in_good_order(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nwhile True:\n    print('busy')\n    time.sleep(0.02)\n")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", PACELINE, "run", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(state_of(tmp_path))},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    try:
        os.close(theirs)
        shown = b""
        while b"busy" not in shown:
            assert select.select([ours], [], [], 20)[0], shown
            shown += os.read(ours, 1000)
        os.close(ours)
        assert process.wait(DOWN_LIMIT_S) == 128 + signal.SIGHUP
    finally:
        process.kill()
        process.wait()
    running = Run(tmp_path, process)
    running.expect_all_gone()
    assert running.events()[-1]["exit_code"] == 129


def test_a_rank_that_raises_but_does_not_end_is_ended(tmp_path: Path) -> None:
    """Also while another one prints without a pause."""
    script = """
        import os, threading, time
        if os.environ["RANK"] == "1":
            threading.Thread(target=time.sleep, args=(100,)).start()
            raise ValueError("stuck")
        while True:
            print("busy")
            time.sleep(0.05)
    """
    with start(tmp_path, *TWO, "train.py", script=script) as running:
        assert running.wait(20) == 1
    assert running.last_line == (
        "paceline: rank 1 on localhost failed first: ValueError: stuck (its process did not end by itself)"
    )


def test_two_runs_side_by_side_do_not_touch_each_other(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with start(tmp_path / "a", "train.py", script="import time; print('up'); time.sleep(2); print('done')") as one:
        one.wait_for("up")
        with start(tmp_path / "b", "train.py", script="import time; print('up'); raise ValueError") as other:
            assert other.wait() == 1
        assert one.wait() == 0
    assert one.out.endswith("done\n")
