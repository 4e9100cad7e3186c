"""Checks of this machine: what the kernel and the container let worker processes do."""

from __future__ import annotations

import mmap
import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from polytrain.linux.machine_resources import machine_resources
from polytrain.linux.processes import is_readable
from polytrain.observe.stacks import stacks_of
from polytrain.view.doctor.finding import CheckFailed, Verdict

_TRIED_BYTES = 64 * 2**20
_FEW_FILES = 1024
_FEW_PROCESSES = 512
_SMALL_SHM = 2**30


def memory_without_files() -> str:
    """Rows and tables are in memory that has no file, which worker processes map."""
    descriptor = os.memfd_create("polytrain-doctor")
    try:
        os.ftruncate(descriptor, _TRIED_BYTES)
        with mmap.mmap(descriptor, _TRIED_BYTES) as memory:
            memory[-1:] = b"x"
            with mmap.mmap(descriptor, _TRIED_BYTES, prot=mmap.PROT_READ) as other:
                if other[-1:] != b"x":
                    raise CheckFailed(
                        "memory of memfd_create isn't shared", "Use a newer kernel or another one"
                    )
    finally:
        os.close(descriptor)
    return f"{_TRIED_BYTES >> 20} MB shared without a file"


def ends_of_processes() -> str:
    """The end of a process is noticed by its descriptor, without polling."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = os.pidfd_open(process.pid)
    try:
        process.kill()
        if not is_readable(descriptor, 5.0):
            raise CheckFailed("the end of a process isn't noticed", "Use a kernel from 5.3 on")
    finally:
        os.close(descriptor)
        process.communicate()
    return "noticed at once"


def local_sockets() -> str:
    """Processes of a node talk over sockets without files."""
    address = f"\0polytrain-doctor-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(address)
        server.listen()
        client.connect(address)
        connection, _ = server.accept()
        with connection:
            client.sendall(b"x")
            if connection.recv(1) != b"x":
                raise CheckFailed("a local socket loses data", "Use another kernel")
    return "connected"


def open_files() -> str:
    """Each rank needs some dozen descriptors in its agent, and connections to all other ranks."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < _FEW_FILES:
        raise CheckFailed(
            f"a process may open {limit} files", f"ulimit -n {max(_FEW_FILES, min(most, 65536))}"
        )
    return f"{limit} for each process"


def processes() -> str:
    """Worker processes and their threads count as processes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and limit < _FEW_PROCESSES:
        raise CheckFailed(
            f"this user may have {limit} processes and threads", f"ulimit -u {_FEW_PROCESSES}"
        )
    return "no limit" if limit == resource.RLIM_INFINITY else f"{limit} for this user"


def resources(environment: Mapping[str, str] = os.environ) -> str:
    """CPUs, memory and GPUs within the limits of the container."""
    found = machine_resources(environment)
    gpus = f", {found['GPU']:g} GPUs" if found["GPU"] else ""
    text = f"{found['CPU']:g} CPUs, {found['memory'] / 2**30:.1f} GiB of memory{gpus}"
    visible = os.cpu_count() or 1
    if found["CPU"] < visible:
        text += f" ({visible} CPUs are visible; the container may use fewer)"
    return text


def shared_memory(directory: Path = Path("/dev/shm")) -> str:
    """Ray's object store and torch's DataLoader workers keep data there."""
    total = shutil.disk_usage(directory).total if directory.is_dir() else 0
    if total < _SMALL_SHM:
        raise CheckFailed(
            f"{directory} has {total >> 20} MB. polytrain doesn't need it; DataLoader workers do",
            "Start the container with --shm-size=2g",
            verdict=Verdict.WARNING,
        )
    return f"{total / 2**30:.1f} GiB"


def stacks() -> str:
    """Stacks of other processes are read by py-spy."""
    program = "import sys\ndef marked_by_doctor(): sys.stdin.read()\nmarked_by_doctor()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        text = stacks_of(process.pid, -1, pausing=False)
    finally:
        process.kill()
        process.communicate()
    if "marked_by_doctor" not in text and "not known" in text:
        raise CheckFailed(
            f"stacks are {text}",
            "Allow ptrace: --cap-add=SYS_PTRACE for containers, or "
            "sysctl kernel.yama.ptrace_scope=0. Worker processes permit it themselves",
            verdict=Verdict.WARNING,
        )
    return "another process's stack was read"


CHECKS: Mapping[str, Callable[[], str]] = {
    "resources": resources,
    "shared rows": memory_without_files,
    "ends of processes": ends_of_processes,
    "local sockets": local_sockets,
    "open files": open_files,
    "processes": processes,
    "/dev/shm": shared_memory,
    "stacks": stacks,
}
