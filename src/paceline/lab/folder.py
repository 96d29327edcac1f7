"""The files of a lab, written before its first process starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from paceline.lab.requirements import tool
from paceline.lab.spec import LabSpec, hosts_file, ssh_config, sshd_config

_KEYGEN_TIMEOUT_S = 20.0


def write_folder(spec: LabSpec) -> None:
    """Lay out the own places, keys and settings of every host. Raises OSError, subprocess.SubprocessError."""
    spec.write()
    client_key = spec.folder / "client_key"
    _make_key(client_key, comment=f"lab {spec.name}")
    for host in spec.hosts:
        _write_machine(spec, host)
    known_hosts = "".join(_known_host(spec, host) for host in spec.hosts)
    for host in spec.hosts:
        _write_ssh(spec.folder / host / "home" / ".ssh", client_key, known_hosts)


def _write_machine(spec: LabSpec, host: str) -> None:
    own = spec.folder / host
    for name in spec.own_places.values():
        (own / name).mkdir(parents=True)
        (own / name).chmod(0o1777 if name.endswith("tmp") else 0o755)
    (own / "home").chmod(0o700)
    (own / "run" / "sshd").mkdir(mode=0o755)
    settings = own / "run" / "paceline-lab"
    settings.mkdir()
    (settings / "sshd_config").write_text(sshd_config())
    _make_key(settings / "host_key", comment=host)
    (own / "hosts").write_text(hosts_file(spec, host))
    # Some systems have "!" as root's password: to sshd a locked account. "*" is only "no password".
    (own / "shadow").write_text("root:*:::::::\n")
    (own / "shadow").chmod(0o600)


def _write_ssh(folder: Path, client_key: Path, known_hosts: str) -> None:
    folder.mkdir(mode=0o700)
    public_key = client_key.with_suffix(".pub").read_text()
    files = {
        "id_ed25519": client_key.read_text(),
        "id_ed25519.pub": public_key,
        "authorized_keys": public_key,
        "known_hosts": known_hosts,
        "config": ssh_config(),
    }
    for name, text in files.items():
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)


def _known_host(spec: LabSpec, host: str) -> str:
    kind, key = (spec.folder / host / "run" / "paceline-lab" / "host_key.pub").read_text().split()[:2]
    return f"{host},{spec.address(host)} {kind} {key}\n"


def _make_key(path: Path, *, comment: str) -> None:
    command = [
        tool("ssh-keygen") or "ssh-keygen",
        "-q",
        "-t",
        "ed25519",
        "-N",
        "",
        "-C",
        comment,
        "-f",
        str(path),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=_KEYGEN_TIMEOUT_S)
