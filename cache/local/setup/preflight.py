"""Checks that a folder can hold a cache: its owner, its other content, and its filesystem."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from dataload.cache import blob_file
from dataload.cache.reports import warn_once
from dataload.errors import ConfigError

# The shared map of LMDB's file and the locks that detect dead processes need one kernel. This is a list of local
# filesystems, because network filesystems are too many to list and a FUSE filesystem may be one.
LOCAL = frozenset(
    {
        "bcachefs",
        "btrfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "jfs",
        "nilfs2",
        "overlay",
        "ramfs",
        "reiserfs",
        "rootfs",
        "tmpfs",
        "xfs",
        "zfs",
    }
)
"""Types of local filesystems, as in /proc/self/mountinfo."""
OUR_NAMES = ("locks", "tmp", "blobs", "index", "index/data.mdb", "FORMAT", "LIMIT")

_LOCKS = re.compile("locks.*")
_OUR_PATHS = re.compile(
    r"locks.*|LIMIT|tmp(/\d{20}-\d+@.+-[0-9a-f]{16})?|index(/((data|lock)\.mdb|(locks\.)?state))?"
    rf"|blobs(/(?P<first>[0-9a-f])(/(?=(?P=first)){blob_file.FILE_NAME.pattern})?)?"
)


def check(path: Path, *, allow_network_filesystem: bool = False) -> None:
    """Check that an existing folder can be used as a cache.

    Args:
        path: The folder.
        allow_network_filesystem: Skip the checks of the filesystem and, since it may show any owner, of the owner.

    Raises:
        ConfigError: The folder must not be used as a cache.
        OSError: The folder cannot be read.
    """
    kind = filesystem_of(path)
    if not allow_network_filesystem and kind not in LOCAL:
        raise ConfigError(f"cache_dir {not_local(path, kind)}: {OVERRIDE}")
    if not allow_network_filesystem:
        check_owner(path)
    file = path / "FORMAT"
    if not file.exists() and (other := _other_file(path)) and not file.exists():  # Another process may create it.
        raise ConfigError(f"cache_dir {path} holds other files ({other}, …): name an empty folder")
    for name in OUR_NAMES:
        if (path / name).is_symlink():
            raise ConfigError(f"cache_dir {path} holds a symbolic link, {name}, that no cache creates: remove it")


def check_owner(path: Path) -> None:
    """Raise ConfigError if an existing folder is another user's."""
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise ConfigError(
            f"cache_dir {path} belongs to user {owner}, this process runs as {os.geteuid()}: name a folder of your "
            "own, such as a new one inside it"
        )


def check_private(path: Path, *, allow_network_filesystem: bool = False) -> None:
    """Check that other users cannot write to a cache, or own a part of it: they may have planted blobs.

    Args:
        path: The folder of the cache.
        allow_network_filesystem: Only warn, and use blobs of any owner and mode. Many of these filesystems show the
            same ones for all files.

    Raises:
        ConfigError: Other users may write to it.
    """
    found = open_to_others(path)
    if found is not None and not allow_network_filesystem:
        raise ConfigError(f"cache_dir {path}: {found[0]}: {found[1]}")
    if found is not None:
        message = f"cache {path}: {found[0]}; it is used, as allow_network_filesystem=True says"
        warn_once(message, message)
        blob_file.trust(path)


def open_to_others(path: Path) -> tuple[str, str] | None:
    """Return how other users may write to a cache, and what to do; None if they cannot."""
    for part in (path, *(path / name for name in OUR_NAMES)):
        with suppress(FileNotFoundError):
            status = part.stat()
            if status.st_uid != os.geteuid():
                what = f"{part} belongs to user {status.st_uid}, who may plant data there, and not to {os.geteuid()}"
                return what, f"remove the folder, or, if you trust them, run `chown -R {os.geteuid()} {path}` as root"
            if status.st_mode & blob_file.OF_OTHERS:
                fix = f"remove the folder, or, if you trust them, run `chmod -R go-w {path}`"
                fix += " and, for fsGroup in Kubernetes, set fsGroupChangePolicy to OnRootMismatch"
                return f"other users may write to {part}, and plant data there", fix
    return None


def _other_file(path: Path) -> str | None:
    """Return a file or folder that may not be of a cache; None if there is none.

    A program that cleans up may have removed FORMAT alone. A cache is closed to other users, who may have planted blobs
    in another folder.
    """
    # Another process may be creating this cache: it writes "locks*" before FORMAT, and all other names after it.
    ours = _OUR_PATHS if stat.S_IMODE(path.stat().st_mode) == 0o700 else _LOCKS
    for folder, folders, files in os.walk(path):
        within = Path(folder).relative_to(path)
        for name in sorted([*folders, *files]):
            if not ours.fullmatch(str(within / name)):
                return str(within / name)
        if within == Path("tmp"):
            folders.clear()
    return None


OVERRIDE = (
    "name a folder on a local disk, or, if only one host uses this folder, allow it: "
    "cache=CacheConfig(..., allow_network_filesystem=True), or --allow-network-filesystem"
)


def not_local(path: Path, kind: str) -> str:
    """Return the message for a filesystem that is not known to be local.

    Args:
        path: The folder.
        kind: Type of its filesystem, or "".
    """
    named = f"a filesystem of type {kind}" if kind else "a filesystem of unknown type"
    return f"{path} is on {named}, which is not known to be local: index and locks do not work across a network"


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the filesystem type of an existing path, such as "ext4"; "" if it is unknown."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real, longest, kind = f"{path.resolve()}/", "", ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount_point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split()[4])
        mounted = f"{mount_point.rstrip('/')}/"
        if real.startswith(mounted) and len(mounted) >= len(longest):  # A later mount hides an earlier one.
            longest, kind = mounted, rest.split()[0]
    return kind
