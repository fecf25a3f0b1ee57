"""How much memory this machine's host has, and what limits it. Reads facts and judges nothing; needs no torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil


def host_memory() -> tuple[int, int]:
    """(available, total) bytes, no more than a container may use."""
    memory = psutil.virtual_memory()
    limit, used = cgroup("memory.max"), cgroup("memory.current")
    if not limit or not limit.isdigit() or int(limit) > memory.total:
        return memory.available, memory.total
    return min(memory.available, int(limit) - int(used or 0)), int(limit)


def shared_memory() -> tuple[int, int] | None:
    """(free, total) bytes of /dev/shm; None where there is none."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize


def pinned_limit() -> int | None:
    """Bytes of host memory that can be pinned at most: under WSL2 about half of it; None: no limit of its own."""
    return host_memory()[1] // 2 if is_wsl2(platform.uname().release) else None


def is_wsl2(kernel_release: str) -> bool:
    """Whether a kernel is that of Windows' Linux subsystem.

    >>> is_wsl2("5.15.167.4-microsoft-standard-WSL2")
    True
    """
    return "microsoft-standard-wsl2" in kernel_release.lower()


def in_container() -> bool:
    """Whether this is a container of Docker or Podman."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def cgroup(name: str) -> str | None:
    """A file of this process's control group, or None."""
    try:
        return (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return None
