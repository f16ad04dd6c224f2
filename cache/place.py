"""Whether a folder can hold a cache: whose it is, what else is in it, and on which filesystem it lies."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dataload.errors import ConfigError

# LMDB maps its file shared between processes and locks it, and dead processes are told by their locks: that needs one
# kernel. Of the FUSE filesystems only some would do; which, cannot be told.
NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
)
OUR_NAMES = ("locks", "tmp", "blobs", "index", "index/data.mdb", "FORMAT")


def check(path: Path) -> None:
    """Raises ConfigError when the existing folder `path` must not be made a cache, or used as one; OSError."""
    kind = filesystem_of(path)
    if kind in NETWORK or kind.startswith("fuse."):
        raise ConfigError(
            f"cache_dir {path} is on a network filesystem ({kind}), where the cache's index and locks do not work: "
            "name a folder on a local disk"
        )
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
