"""Draw order.svg from the actual shuffle order: python docs/pictures/draw.py."""

from __future__ import annotations

from colorsys import hls_to_rgb
from pathlib import Path

import numpy as np

from dataload.samplers.order import Order

GROUPS, ROWS, BATCH = 12, 12, 12
WIDTH, BAR, LEFT = 480, 3, 24  # pixels
STRIPS = (
    ("shuffle=False: as in the files", {"shuffle": False}),
    ("shuffle=True, window=4: epoch 0", {"window": 4}),
    ("shuffle=True, window=4: epoch 1", {"window": 4, "epoch": 1}),
    ('shuffle="full": every row anywhere', {"shuffle": "full"}),
)


def strip(title: str, top: int, epoch: int = 0, **options: object) -> list[str]:
    order = Order([ROWS] * GROUPS, seed=1, **options)
    rows = order.rows(epoch, np.arange(GROUPS * ROWS))
    drawn = [f'<text x="{LEFT}" y="{top + 14}">{title.replace(chr(34), "&quot;")}</text>']
    drawn += [
        f'<rect x="{LEFT + at * BAR}" y="{top + 22}" width="{BAR}" height="34" fill="{colour(*divmod(row, ROWS))}"/>'
        for at, row in enumerate(rows.tolist())
    ]
    for batch in range(0, GROUPS * ROWS + 1, BATCH):
        x = LEFT + batch * BAR
        drawn.append(f'<line x1="{x}" x2="{x}" y1="{top + 20}" y2="{top + 60}" stroke="#222" stroke-width="0.7"/>')
    return drawn


def colour(group: int, row: int) -> str:
    """Return a colour with the hue of the row group and the lightness of the row."""
    red, green, blue = hls_to_rgb(group / GROUPS, 0.3 + 0.45 * row / ROWS, 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


def picture() -> str:
    height = 84 * len(STRIPS) + 24
    drawn = [part for at, (title, options) in enumerate(STRIPS) for part in strip(title, 84 * at, **options)]
    note = f"each bar is a row, each colour a row group; lines end global batches of {BATCH}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            "<style>text { font-size: 13px }</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            *drawn,
            f'<text x="{LEFT}" y="{height - 10}" style="font-size: 11px" fill="#555">{note}</text>',
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_name("order.svg").write_text(picture())
