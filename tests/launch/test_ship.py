"""The project on its way: what travels, what is left where it is, and the same hash on both sides."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InputError
from paceline.launch import protocol, receive, ship
from paceline.launch.receive import CopyInUseError, ProjectCopy
from paceline.launch.ship import Cargo, find_project, load_package, load_project

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]


@pytest.fixture(autouse=True)
def own_git_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this machine's user has told git (global ignores, say) is not part of a test."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))


def git(folder: Path, *words: str) -> None:
    subprocess.run([*GIT, "-C", str(folder), *words], check=True, capture_output=True, timeout=20)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def load(root: Path) -> Cargo:
    return load_project(ship.Project(root=root, cwd=root, reason=""))


def paths(root: Path) -> list[str]:
    return [entry[0] for entry in load(root).entries]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def deliver(tmp_path: Path) -> Callable[[Cargo], tuple[Path, list[str]]]:
    """Ship a cargo to `tmp_path/host` as driver and agent do; the copy and what had to be sent."""

    def deliver(cargo: Cargo) -> tuple[Path, list[str]]:
        return send(cargo, tmp_path / "host")

    return deliver


def send(cargo: Cargo, base: Path) -> tuple[Path, list[str]]:
    copy = ProjectCopy(str(base), cargo.name, take_another=True)
    try:
        missing = copy.missing([list(entry) for entry in cargo.entries])
        receive_all(copy, ship.pieces(cargo, missing))
        assert copy.digest() == cargo.digest
        return Path(copy.folder), missing
    finally:
        copy.close()


def receive_all(copy: ProjectCopy, pieces: Iterator[tuple[protocol.FileData, bytes]]) -> None:
    """Through the bytes of the wire, as the agent gets them."""
    decoder, ends = protocol.Decoder(), []
    for message, data in pieces:
        for received, payload in decoder.feed(protocol.encode(message, data)):
            assert isinstance(received, protocol.FileData)
            copy.write(received.path, payload, last=received.last_of_file)
            ends.append(received.last_of_all)
    assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)


def tree(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


# What belongs to a project


def test_git_tracked_and_untracked_but_not_ignored(project: Path) -> None:
    git(project, "init")
    write(project, {".gitignore": "data/\n*.pt\n", "train.py": "", "lib/net.py": "", "data/big": "", "x.pt": ""})
    git(project, "add", "train.py", ".gitignore")
    write(project, {"gone.py": ""})
    git(project, "add", "gone.py")
    (project / "gone.py").unlink()
    assert paths(project) == [".gitignore", "lib/net.py", "train.py"]


def test_what_git_ignores_is_named_but_for_caches(project: Path) -> None:
    ignored = ("data/train.bin", "best.pt", "__pycache__/a.pyc", ".venv/bin/python", "x.pyc")
    write(project, {".gitignore": "data/\n*.pt\n__pycache__/\n.venv/\n*.pyc\n", **dict.fromkeys(ignored, "x")})
    git(project, "init")
    assert load(project).left_behind == ("best.pt", "data/")


def test_without_git_all_but_caches(project: Path) -> None:
    skipped = ["__pycache__/a.pyc", ".venv/bin/python", "node_modules/x", ".git/config"]
    write(project, {"train.py": "", "data/x": "", ".env": "", **dict.fromkeys(skipped, "")})
    (project / ".git" / "config").unlink()
    assert paths(project) == [".env", "data/x", "train.py"]


def test_a_repository_of_another_user_is_not_shipped_without_its_ignores(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(project, "init")
    write(project, {".gitignore": ".env", ".env": "secret", "train.py": ""})
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to have this without a second user
    for ask in (lambda: find_project(project, project / "train.py"), lambda: load(project)):
        with pytest.raises(InputError, match="dubious ownership") as caught:
            ask()
        assert caught.value.hint == f"git config --global --add safe.directory {project}"


def test_a_broken_repository_is_not_shipped_without_its_ignores(project: Path) -> None:
    write(project, {".git": "gitdir: /gone/worktrees/x", ".env": "secret"})
    with pytest.raises(InputError, match="not a git repository: /gone/worktrees/x") as caught:
        load(project)
    assert caught.value.hint and caught.value.hint.startswith(f"mend what stops: git -C {project} ls-files")


def test_a_git_that_does_not_answer(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"bin/git": "#!/bin/sh\nexec /bin/sleep 20\n"})
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(ship, "_GIT_LIMIT_S", 0.1)
    with pytest.raises(InputError, match="no answer within"):
        load(project)


def test_no_git_program_is_no_error(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, {"train.py": "", ".git/config": ""})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_project(project, None).root == project
    assert paths(project) == ["train.py"]


def test_submodules_and_inner_repositories_travel(project: Path) -> None:
    git(project, "init")
    write(project, {"train.py": "", "lib/net.py": "", "lib/skip.log": "", "lib/.gitignore": "*.log"})
    git(project / "lib", "init")
    git(project / "lib", "add", ".")
    git(project / "lib", "commit", "-m", "x")
    assert paths(project) == ["lib/.gitignore", "lib/net.py", "train.py"]
    git(project, "add", "train.py", "lib")  # as a submodule is recorded
    assert paths(project) == ["lib/.gitignore", "lib/net.py", "train.py"]
    subprocess.run(["rm", "-r", str(project / "lib")], check=True, timeout=10)
    (project / "lib").mkdir()  # a submodule that was never fetched
    assert paths(project) == ["train.py"]


def test_links(project: Path, tmp_path: Path) -> None:
    write(project, {"a/real.py": "x"})
    write(tmp_path, {"outside/data.txt": "outside", "outside.txt": "file"})
    (project / "inside").symlink_to("a/real.py")
    (project / "a" / "up").symlink_to("../inside")
    (project / "folder").symlink_to("a")
    (project / "file").symlink_to("../outside.txt")
    (project / "data").symlink_to(tmp_path / "outside")
    (project / "relative").symlink_to("../outside")
    (project / "broken").symlink_to("/nowhere/at/all")
    os.mkfifo(project / "pipe")
    found = {entry[0]: entry[4] if entry[3] is None else entry[2] for entry in load(project).entries}
    assert found == {
        "a/real.py": 1,
        "a/up": "../inside",
        "inside": "a/real.py",
        "folder": "a",
        "file": 4,  # it leaves the project: the content travels
        "data": str(tmp_path / "outside"),  # the hosts may have that folder, too
    }


def test_a_file_that_cannot_be_read_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, {"train.py": ""})

    def refuse(path: str) -> str:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(ship, "file_sha256", refuse)  # root, as whom tests may run, can read anything
    with pytest.raises(InputError, match=r"project/train\.py can't be copied to the other hosts: Permission denied"):
        load(project)


def test_too_much_to_be_code(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, {"data/a": "x" * 3000, "data/b": "x" * 3000, "train.py": "x"})
    monkeypatch.setattr(ship, "SHIP_LIMIT_BYTES", 5000)
    with pytest.raises(InputError) as caught:
        load(project)
    assert caught.value.message == (
        f"the project {project} is over 5.0 kB, too much to copy to every host: data (6.0 kB), train.py (1 B)"
    )
    assert caught.value.hint and ".gitignore" in caught.value.hint and "--no-ship" in caught.value.hint


def test_a_package_without_its_caches() -> None:
    cargo = load_package("paceline")
    assert cargo is not None and cargo.name.startswith("package-paceline-")
    names = [entry[0] for entry in cargo.entries]
    assert "paceline/launch/ship.py" in names and not [name for name in names if "__pycache__" in name]
    assert load_package("no_such_package") is None


# Which folder it is


def test_the_project_is_the_git_repository(project: Path) -> None:
    git(project, "init")
    write(project, {"src/train.py": ""})
    found = find_project(project / "src", project / "src" / "train.py")
    assert (found.root, found.cwd_below_root) == (project, "src")


def test_the_project_of_a_script_elsewhere_is_that_of_the_script(project: Path, tmp_path: Path) -> None:
    git(project, "init")
    write(project, {"src/train.py": ""})
    found = find_project(tmp_path, project / "src" / "train.py")
    assert (found.root, found.cwd) == (project, project / "src")


@pytest.mark.parametrize("with_git", [True, False])
def test_a_script_outside_by_dots_is_outside(project: Path, tmp_path: Path, with_git: bool) -> None:
    write(tmp_path, {"other/train.py": ""})
    if with_git:
        git(project, "init")
    found = find_project(project, project / ".." / "other" / "train.py")
    assert found.root == tmp_path / "other"


def test_without_git_it_is_the_folder_where_the_command_was_typed(project: Path) -> None:
    write(project, {"src/train.py": ""})
    assert find_project(project, project / "src" / "train.py").root == project
    assert find_project(project, None).root == project


def test_a_home_folder_is_no_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project))
    git(project, "init")  # as those do who keep their dotfiles in git
    with pytest.raises(InputError, match="is no project folder") as caught:
        find_project(project, project / "train.py")
    assert caught.value.hint and "--no-ship" in caught.value.hint
    (project / "p").mkdir()
    assert find_project(project, project / "p" / "train.py").root == project / "p"


def test_the_token_lies_in_the_project_or_nowhere(project: Path) -> None:
    written = ship.write_token(project)
    assert written is not None and written[0].parent == project and written[0].read_text() == written[1]
    assert ship.write_token(project / "gone") is None


# On the host


def test_all_kinds_of_files_arrive(project: Path, deliver: Callable[[Cargo], tuple[Path, list[str]]]) -> None:
    names = ["plain.py", "with space.py", "new\nline", "größe ☃", "quote'\"$x", "-dash", "deep/er/er.py"]
    write(project, dict(zip(names, names, strict=True)))
    write(project, {"empty": "", "run.sh": "#!/bin/sh\n", "frozen": "x"})
    (project / os.fsdecode(b"latin-\xe9")).write_text("latin")
    (project / "run.sh").chmod(0o755)
    (project / "frozen").chmod(0o444)
    (project / "link").symlink_to("deep/er")
    copy, sent = deliver(load(project))
    assert tree(copy) == tree(project)
    assert os.access(copy / "run.sh", os.X_OK) and not (copy / "plain.py").stat().st_mode & 0o111
    assert (copy / "frozen").stat().st_mode & 0o777 == 0o444
    assert os.readlink(copy / "link") == "deep/er" and "link" not in sent
    assert deliver(load(project))[1] == [], "what is there already does not travel again"


def test_nothing_is_written_or_removed_through_a_link(project: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "bigdata"
    write(elsewhere, {"x": "precious"})
    write(project, {"d/x": "one"})
    git(project, "init")
    git(project, "add", "-A")
    copy, _ = send(load(project), tmp_path / "host")
    shutil.rmtree(project / "d")
    (project / "d").symlink_to(elsewhere)
    assert paths(project) == ["d"], "what git still lists below the link is not the project's"
    send(load(project), tmp_path / "host")
    assert (copy / "d").is_symlink() and (elsewhere / "x").read_text() == "precious"
    (project / "d").unlink()
    write(project, {"d/x": "two"})
    send(load(project), tmp_path / "host")
    assert (copy / "d/x").read_text() == "two" and not (copy / "d").is_symlink()
    assert (elsewhere / "x").read_text() == "precious"


def test_only_what_changed_travels(project: Path, deliver: Callable[[Cargo], tuple[Path, list[str]]]) -> None:
    write(project, {"a.py": "1", "b.py": "2", "c.py": "3"})
    deliver(load(project))
    write(project, {"b.py": "two", "d.py": "4"})
    (project / "a.py").chmod(0o755)
    copy, sent = deliver(load(project))
    assert sent == ["b.py", "d.py"]
    assert os.access(copy / "a.py", os.X_OK), "a mode needs no data"


def test_deleted_files_go_and_what_the_run_wrote_stays(
    project: Path, deliver: Callable[[Cargo], tuple[Path, list[str]]]
) -> None:
    write(project, {"train.py": "", "old/sub/net.py": "", "util/a.py": ""})
    copy, _ = deliver(load(project))
    write(copy, {"checkpoints/00100": "weights", "util/cache.pt": "x"})
    for name in ("old/sub/net.py", "util/a.py"):
        (project / name).unlink()
    deliver(load(project))
    assert tree(copy) == {"train.py": "", "checkpoints/00100": "weights", "util/cache.pt": "x"}
    assert not (copy / "old").exists(), "an empty folder could still be imported"


Change = Callable[[Path], object]
KINDS: dict[str, Change] = {
    "file": lambda path: path.write_text("file"),
    "folder": lambda path: write(path, {"x.py": "x", "sub/y.py": "y"}),
    "inner link": lambda path: path.symlink_to("other"),
    "link to nowhere yet": lambda path: path.symlink_to("later"),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_anything_may_become_anything(tmp_path: Path, before: str, after: str) -> None:
    cargos: list[Cargo] = []
    for number, kind in enumerate((before, after)):
        root = tmp_path / str(number) / "project"
        write(root, {"other/z.py": "z"})
        KINDS[kind](root / "thing")
        cargo = load(root)
        cargos.append(Cargo(name="project", root=root, entries=cargo.entries, digest=cargo.digest))
    for cargo in cargos:
        copy, _ = send(cargo, tmp_path / "host")
    assert tree(copy) == tree(cargos[1].root)
    assert (copy / "other" / "z.py").read_text() == "z"


def test_a_folder_with_the_users_results_is_not_removed_for_a_file(
    project: Path, deliver: Callable[[Cargo], tuple[Path, list[str]]]
) -> None:
    write(project, {"out/a.py": ""})
    copy, _ = deliver(load(project))
    write(copy, {"out/result": "weeks of work"})
    (project / "out" / "a.py").unlink()
    (project / "out").rmdir()
    write(project, {"out": "now a file"})
    with pytest.raises(OSError, match="not empty"):
        deliver(load(project))
    assert (copy / "out" / "result").read_text() == "weeks of work"


def test_a_copy_cut_short_is_completed_the_next_time(
    project: Path, tmp_path: Path, deliver: Callable[[Cargo], tuple[Path, list[str]]]
) -> None:
    write(project, {"a.py": "1" * 100, "b.py": "2"})
    cargo = load(project)
    copy = ProjectCopy(str(tmp_path / "host"), cargo.name, take_another=False)
    assert copy.missing(cargo.entries) == ["a.py", "b.py"]
    copy.write("a.py", b"1" * 50, last=False)
    copy.close()
    folder, sent = deliver(cargo)
    assert sent == ["a.py", "b.py"]
    assert tree(folder) == tree(project)


def test_a_file_that_changes_meanwhile_is_noticed(project: Path, tmp_path: Path) -> None:
    write(project, {"a.py": "1", "b.py": "2"})
    cargo = load(project)
    write(project, {"a.py": "changed"})
    (project / "b.py").unlink()
    copy = ProjectCopy(str(tmp_path / "host"), cargo.name, take_another=False)
    receive_all(copy, ship.pieces(cargo, copy.missing(cargo.entries)))
    assert copy.digest() != cargo.digest
    copy.close()


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a/..", ".."])
def test_a_path_that_leaves_the_copy_is_refused(tmp_path: Path, path: str) -> None:
    copy = ProjectCopy(str(tmp_path / "host"), "p", take_another=False)
    with pytest.raises(ValueError, match="a path that leaves the project"):
        copy.missing([[path, 0o644, 1, "0" * 64, None]])
    with pytest.raises(ValueError, match="a path that leaves the project"):
        copy.write(path, b"x", last=True)
    copy.close()
    assert not (tmp_path / "x").exists()


def test_a_second_run_takes_the_next_folder(tmp_path: Path) -> None:
    copies = [ProjectCopy(str(tmp_path), "p", take_another=True) for _ in range(3)]
    assert [Path(copy.folder).name for copy in copies] == ["p", "p.2", "p.3"]
    copies[1].close()
    again = ProjectCopy(str(tmp_path), "p", take_another=True)
    assert Path(again.folder).name == "p.2"
    for copy in [*copies, again]:
        copy.close()


def test_a_copy_in_use_is_left_alone(tmp_path: Path) -> None:
    first = ProjectCopy(str(tmp_path), "p", take_another=False)
    with pytest.raises(CopyInUseError):
        ProjectCopy(str(tmp_path), "p", take_another=False)
    first.close()
    ProjectCopy(str(tmp_path), "p", take_another=False).close()


def test_there_is_an_end_to_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "_MOST_COPIES", 2)
    copies = [ProjectCopy(str(tmp_path), "p", take_another=True) for _ in range(2)]
    with pytest.raises(OSError, match="other runs are using all 2 copies"):
        ProjectCopy(str(tmp_path), "p", take_another=True)
    for copy in copies:
        copy.close()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)  # no such file system can be had here
    copy = ProjectCopy(str(tmp_path), "p", take_another=True)
    assert Path(copy.folder).name == "p"
    copy.close()


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_nobody_else_may_read_a_copy(project: Path, tmp_path: Path, mode: int) -> None:
    write(project, {"secret": "x" * 10})
    (project / "secret").chmod(mode)
    cargo = load(project)
    before = os.umask(0o022)
    try:
        copy = ProjectCopy(str(tmp_path / "projects"), "p", take_another=False)
        assert (tmp_path / "projects").stat().st_mode & 0o777 == 0o700
        assert copy.missing(cargo.entries) == ["secret"]
        part = Path(copy.folder, ".paceline-part")
        part.touch(0o644)  # as an earlier run may have left it
        copy.write("secret", b"x" * 5, last=False)
        assert part.stat().st_mode & 0o777 & ~mode == 0
        copy.write("secret", b"x" * 5, last=True)
        assert Path(copy.folder, "secret").stat().st_mode & 0o777 == mode
        copy.close()
    finally:
        os.umask(before)


def test_a_file_that_cannot_be_read_to_its_end_is_left_to_the_hash(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    cargo = load(tmp_path)
    (tmp_path / "x").unlink()
    os.symlink("/proc/self/mem", tmp_path / "x")  # it opens, and reading its first page is an I/O error
    [(message, data)] = ship.pieces(cargo, ["x"])
    assert message.last_of_all and data == b""


def test_a_base_that_is_no_folder_is_an_os_error(tmp_path: Path) -> None:
    write(tmp_path, {"file": ""})
    with pytest.raises(OSError, match="file"):
        ProjectCopy(str(tmp_path / "file" / "projects"), "p", take_another=True)


def test_a_read_only_folder_is_an_os_error(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o555)
    with pytest.raises(PermissionError):
        ProjectCopy(str(tmp_path / "projects"), "p", take_another=True)
    tmp_path.chmod(0o755)


def test_a_socket_is_left_out(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        write(project, {"train.py": ""})
        assert paths(project) == ["train.py"]


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda name: name not in {".", "..", ".git"} and name not in ship._SKIPPED_FOLDERS
)
FILES = st.dictionaries(st.tuples(st.sampled_from(["", "a/", "a/b/"]), NAMES), st.binary(max_size=30), max_size=5)


@given(st.lists(FILES, min_size=1, max_size=3), st.integers(1, 7))
def test_any_files_in_pieces_of_any_size_arrive(states: Sequence[dict[tuple[str, str], bytes]], size: int) -> None:
    with tempfile.TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "MAX_PAYLOAD_BYTES", size)
        for number, files in enumerate(states):
            root = Path(base, str(number), "project")
            root.mkdir(parents=True)
            kept = {f"{folder}{name}": data for (folder, name), data in files.items() if name not in ("a", "b")}
            for path, data in kept.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(data)
            cargo = load(root)
            copy, _ = send(Cargo(name="p", root=root, entries=cargo.entries, digest=cargo.digest), Path(base, "host"))
            found = {path.relative_to(copy).as_posix(): path for path in copy.rglob("*") if path.is_file()}
            assert {path: file.read_bytes() for path, file in found.items()} == kept
