"""A report as one HTML page without scripts or external resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from dataload.reporting.aggregate import Epoch, epochs
from dataload.runtime.text import counted, duration
from dataload.telemetry.loader_stats import TIERS
from dataload.telemetry.stats_log import Pass
from dataload.telemetry.wait_timeline import CAUSES

MOST_NAMED = 5  # stragglers or missing ranks in one text; the table marks all stragglers
LONG = 3600.0  # seconds between two epochs that probably belong to two runs
STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1200px; margin: 0 auto;
  padding: 1rem }
h1 { font-size: 1.5rem; margin: 0 }
h2 { font-size: 1rem; margin: 0 }
p, summary { overflow-wrap: anywhere }
.advice { border-left: 4px solid #d55e00; padding: 0.3rem 0.8rem; background: #fdf3ec }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 1.5rem;
  margin: 1.5rem 0 }
figure { margin: 0 }
img { width: 100%; height: auto }
details { border-top: 1px solid #ddd; padding: 0.4rem 0 }
summary { cursor: pointer }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; margin: 0.5rem 0 }
th, td { padding: 0.2rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee }
th { font-weight: 600 }
.late { background: #fdf3ec }
small { color: #666 }
"""


def summary(passes: Sequence[Pass]) -> dict[str, Any]:
    """Return a JSON-able summary: notes on the run, and each epoch's statistics, stragglers and advice."""
    found = epochs(passes)
    of_epochs = [
        {
            "epoch": epoch.number,
            "restarts": epoch.restarts,
            "ended": epoch.ended,
            "advice": str(epoch.total),
            "stragglers": {str(rank): seconds for rank, seconds in epoch.stragglers().items()},
            "late": epoch.late(),
            "total": epoch.total.as_json(),
            "ranks": {str(rank): record.stats.as_json() for rank, record in epoch.ranks.items()},
        }
        for epoch in found
    ]
    return {"notes": notes(passes, found), "epochs": of_epochs}


def notes(passes: Sequence[Pass], found: Sequence[Epoch]) -> list[str]:
    """Return a line for each anomaly of the folder, with its remedy."""
    lines = []
    present, world_size = {record.rank for record in passes}, max(record.world_size for record in passes)
    missing = world_size - sum(rank < world_size for rank in present)
    if missing > 0:
        absent = (rank for rank in range(world_size) if rank not in present)
        named = [str(rank) for rank in islice(absent, MOST_NAMED)]
        more = f" and {missing - len(named)} more" if missing > len(named) else ""
        lines.append(
            f"{'rank' if missing == 1 else 'ranks'} {', '.join(named)}{more} wrote nothing here: copy the files of "
            "other hosts into this folder, or give all hosts one folder that they share"
        )
    gaps = [(after.began - before.until, after) for before, after in pairwise(found)]
    gap, after = max(gaps, key=itemgetter(0), default=(0, found[0]))
    if gap > LONG:
        again = " again" if after.restarts else ""
        lines.append(
            f"nothing ran for {duration(gap)} before epoch {after.number} was begun{again}: if these are two runs, "
            "give each its own folder"
        )
    return lines


def html(passes: Sequence[Pass], title: str) -> str:
    """Return the page. title: name of the run."""
    from dataload.reporting.plots import plots, svg

    found = epochs(passes)
    ranks, numbers = len({record.rank for record in passes}), Counter(epoch.number for epoch in found)
    again = sum(times > 1 for times in numbers.values())
    number = counted(len(numbers), "epoch") + (f" ({again} begun again)" if again else "")
    seconds = max(record.until for record in passes) - min(record.began for record in passes)
    figures = "".join(
        f'<figure><h2>{plot.title}</h2><img src="{svg(plot)}" alt="{plot.title}, as a plot"></figure>\n'
        for plot in plots(passes, found)
    )
    tables = "".join(_epoch(epoch, opened=epoch is found[-1]) for epoch in reversed(found))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{number} on {counted(ranks, "rank")} in {duration(seconds)}. The last one:</p>
<p class="advice">{escape(str(found[-1].total))}</p>
{_late(found[-1])}
{"".join(f'<p class="advice">{escape(note)}</p>' for note in notes(passes, found))}
<div class="plots">
{figures}</div>
{tables}
<p><small>Totals sum rows and bytes over all ranks and average seconds. A rank is marked if its loop waited for data
longer than the median rank's, by more than a twentieth of the epoch: in synchronous training the others waited for it.
</small></p>
</body>
</html>
"""


def _epoch(epoch: Epoch, *, opened: bool) -> str:
    late = epoch.stragglers()
    causes = [cause for cause in CAUSES if epoch.total.waits[cause]]
    rows = "".join(_row(record, causes, late=rank in late) for rank, record in epoch.ranks.items())
    headings = ["rank", "host", "rows", "rows/s", "seconds", "waiting", *(f"on {cause}, s" for cause in causes)]
    headings += ["hits", *(f"from {tier}" for tier in TIERS)]
    again = f", begun again ({epoch.restarts})" if epoch.restarts else ""
    cut = "" if epoch.ended else ", not ended"
    return f"""<details{" open" if opened else ""}>
<summary>{escape(str(epoch.total))}{again}{cut}</summary>
{_late(epoch)}
<div class="wide"><table>
<tr>{"".join(f"<th>{heading}</th>" for heading in headings)}</tr>
{rows}</table></div>
{_sources(epoch)}</details>
"""


def _sources(epoch: Epoch) -> str:
    """Return a table of the sources of a mixture, or nothing without sources."""
    total = epoch.total
    if not total.rows_by_source:
        return ""
    rows = ""
    for name, count in sorted(total.rows_by_source.items(), key=itemgetter(1), reverse=True):
        waited, fetched = total.waits_by_source.get(name, 0.0), int(total.bytes_by_source.get(name, 0))
        cells = name, f"{count:,}", f"{count / max(1, total.rows):.1%}", f"{waited:,.1f}", decimal(fetched)
        rows += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
    headings = "source", "rows", "share of the rows", "waiting, s", "fetched"
    return f"""<div class="wide"><table>
<tr>{"".join(f"<th>{heading}</th>" for heading in headings)}</tr>
{rows}</table></div>
"""


def _row(record: Pass, causes: Sequence[str], *, late: bool) -> str:
    stats = record.stats
    cells = [
        *(f"{record.rank}", record.host, f"{stats.rows:,}", f"{stats.rows_per_second:,.0f}", f"{stats.seconds:,.1f}"),
        f"{stats.stall_fraction:.1%}",
        *(f"{stats.waits[cause]:,.1f}" for cause in causes),
        f"{stats.hit_rate:.1%}" if stats.hits + stats.misses else "\N{EN DASH}",
        *(decimal(int(getattr(stats, f"bytes_{tier}"))) for tier in TIERS),
    ]
    marked = ' class="late"' if late else ""
    return f"<tr{marked}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"


def _late(epoch: Epoch) -> str:
    late = epoch.late()
    more = f"<p>And {counted(len(late) - MOST_NAMED, 'more straggler')}.</p>" if len(late) > MOST_NAMED else ""
    return "".join(f"<p>Straggler: {escape(line)}</p>\n" for line in late[:MOST_NAMED]) + more


def write(passes: Sequence[Pass], path: Path, title: str) -> None:
    """Write the page to `path`."""
    path.write_text(html(passes, title), encoding="utf-8", errors="replace")  # a title may be a path
