"""Whether a folder can hold a cache: whose it is, what else is in it, and on which filesystem it lies."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dataload.errors import ConfigError

# LMDB maps its file shared between processes and locks it, and dead processes are told by their locks: that needs one
# kernel. Network filesystems are too many to name, and a FUSE filesystem does not say whether it is one.
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
"""Types of filesystems, as /proc/self/mountinfo names them, that belong to one kernel."""
OUR_NAMES = ("locks", "tmp", "blobs", "index", "index/data.mdb", "FORMAT", "LIMIT")


def check(path: Path, *, allow_network_filesystem: bool = False) -> None:
    """Raises ConfigError when the existing folder `path` must not be made a cache, or used as one; OSError."""
    kind = filesystem_of(path)
    if not allow_network_filesystem and kind not in LOCAL:
        raise ConfigError(f"cache_dir {not_local(path, kind)}: {OVERRIDE}")
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise ConfigError(
            f"cache_dir {path} belongs to user {owner}, this process runs as {os.geteuid()}: name a folder of your "
            "own, such as a new one inside it"
        )
    # Another process may be making this very cache: it writes these names first, and the others after FORMAT.
    strangers = sorted(child.name for child in path.iterdir() if not child.name.startswith("locks"))
    if strangers and not (path / "FORMAT").exists():
        raise ConfigError(f"cache_dir {path} holds other files ({strangers[0]}, …): name an empty folder")
    for name in OUR_NAMES:
        if (path / name).is_symlink():
            raise ConfigError(f"cache_dir {path} holds a symbolic link, {name}, that no cache made: remove it")


OVERRIDE = "name a folder on a local disk, or, if one host alone uses this one, set allow_network_filesystem=True"


def not_local(path: Path, kind: str) -> str:
    """Say of a folder that its filesystem is not known to be local. kind: the type of the filesystem, or ""."""
    named = f"a filesystem of type {kind}" if kind else "a filesystem of unknown type"
    return f"{path} is on {named}, which is not known to be local: index and locks do not work across a network"


def make_private(path: Path) -> None:
    """Nobody else may look into a folder that becomes a cache. Raises OSError."""
    if stat.S_IMODE(path.stat().st_mode) != 0o700:
        path.chmod(0o700)


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the filesystem that an existing path is on, such as "ext4"; "" when it cannot be told."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real, longest, kind = f"{path.resolve()}/", "", ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mounted = f"{_unescaped(fields.split()[4]).rstrip('/')}/"
        if real.startswith(mounted) and len(mounted) >= len(longest):  # Of two on one folder the later one counts.
            longest, kind = mounted, rest.split()[0]
    return kind


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
