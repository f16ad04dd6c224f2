"""What reading a dataset will take, from its footers alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.filesize import decimal

from dataload.cache.blocks import Object
from dataload.manifest import Manifest
from dataload.rowblobs import RowBlobs
from dataload.samplers.trade import WindowTrade, default_window, weigh_window


@dataclass(frozen=True)
class Plan:
    """bytes: of the objects; decoded_bytes: of their rows as records, about, which is what a cache must hold to fetch
    and decode them once; requests: of the first epoch, beside the one for each footer.

    trade: what the window of a "block" shuffle buys and costs.
    """

    objects: int
    bytes: int
    decoded_bytes: int
    rows: int
    row_groups: int
    requests: int
    trade: WindowTrade

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        trade = self.trade
        return "\n".join(
            [
                f"{self.objects} objects, {decimal(self.bytes)}; {self.rows:,} rows in {self.row_groups:,} row groups",
                f"first epoch: {self.requests:,} requests",
                f"later ones: none, with a cache of about {decimal(self.decoded_bytes)}, the size of its rows",
                f"window of {trade.window} row groups:",
                f"  shuffle: variance ratio {trade.variance_ratio:.2f} over data sorted by label (1 is uniform)",
                f"  first batch: waits for {trade.first_row_groups} row groups, {decimal(trade.first_bytes)}",
                f"  memory: {decimal(trade.bytes)} of row groups as stored, two windows of them",
            ]
        )


def plan(manifest: Manifest, blobs: RowBlobs, objects: list[Object], window: int | None, batch_size: int) -> Plan:
    """The plan for a global batch of `batch_size` rows. window: row groups; None: the default."""
    lengths = [group.rows for group in manifest.row_groups]
    sizes = [group.bytes for group in manifest.row_groups]
    chosen = default_window(lengths, sizes) if window is None else window
    return Plan(
        objects=len(objects),
        bytes=sum(obj.size for obj in objects),
        decoded_bytes=blobs.num_bytes,
        rows=manifest.num_rows,
        row_groups=len(lengths),
        requests=blobs.requests(),
        trade=weigh_window(chosen, lengths, sizes, batch_size),
    )
