"""Paths of the Hugging Face Hub: the commit that a branch is at, and the URL of a file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

COMMIT = re.compile(r"(?P<repository>(datasets|spaces)/[^/@]+/[^/@]+)@[0-9a-f]{40}(?=/|$)")


def without_commit(path: str) -> str:
    """Return a path of the Hub without a commit: the version of a file does not depend on commits of other files."""
    found = COMMIT.match(path)
    return path if found is None else found["repository"] + path[found.end() :]


def names_commit(path: str) -> bool:
    """Return whether a path names a commit, whose files never change."""
    return COMMIT.match(path) is not None


def pinned(filesystem: Any, paths: Iterable[str]) -> list[str]:
    """Return paths at the commits that their branches are at. All of a branch are at the same one."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=filesystem.endpoint, token=filesystem.token)
    commits: dict[tuple[str, str], str] = {}
    found = []
    for path in paths:
        place = None if names_commit(path) or path.startswith("buckets/") else filesystem.resolve_path(path)
        if place is None or place.repo_type not in ("dataset", "space"):  # Others are no data.
            found.append(path)
            continue
        branch = place.root, place.revision
        if branch not in commits:
            info = api.repo_info(place.repo_id, revision=place.revision, repo_type=place.repo_type)
            commits[branch] = str(info.sha)
        at = f"{place.root.partition('@')[0]}@{commits[branch]}/{place.path_in_repo}".rstrip("/")
        found.append(at if names_commit(at) else path)
    return found


def resolved(filesystem: Any, path: str) -> tuple[str, dict[str, str]]:
    """Return the URL of a file and the headers to send there. The latter have the user's token."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    place = filesystem.resolve_path(path)
    headers = build_hf_headers(token=filesystem.token)
    if (bucket := getattr(place, "bucket_id", None)) is not None:
        return f"{filesystem.endpoint}/buckets/{bucket}/resolve/{quote(place.path)}", headers
    named = {"repo_type": place.repo_type, "revision": place.revision, "endpoint": filesystem.endpoint}
    return hf_hub_url(place.repo_id, place.path_in_repo, **named), headers
