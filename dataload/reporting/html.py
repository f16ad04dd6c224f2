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

from dataload.reporting.aggregate import Epoch, epochs, whole
from dataload.runtime.text import counted, duration, few, precise
from dataload.telemetry.loader_stats import QUANTILES, TIERS, LoaderStats
from dataload.telemetry.stats_log import Pass
from dataload.telemetry.wait_timeline import CAUSES

MOST_NAMED = 5  # stragglers or missing ranks in one text; the table marks all stragglers
PAUSE = 60.0  # seconds without a batch that the table of epochs shows
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
.pause td { text-align: left; background: #f4f4f4 }
small { color: #666 }
"""


def summary(passes: Sequence[Pass]) -> dict[str, Any]:
    """Return a JSON-able summary: notes on the run, its statistics, and each epoch's, with stragglers and advice."""
    found = epochs(passes)
    of_epochs = [
        {
            "epoch": epoch.number,
            "restarts": epoch.restarts,
            "restarted": epoch.restarted,
            "began": epoch.began,
            "pause": epoch.pause,
            "ended": epoch.ended,
            "advice": str(epoch.total),
            "stragglers": {str(rank): seconds for rank, seconds in epoch.stragglers().items()},
            "late": epoch.late(),
            "total": epoch.total.as_json(),
            "ranks": {str(rank): record.stats.as_json() for rank, record in epoch.ranks.items()},
        }
        for epoch in found
    ]
    return {"notes": notes(passes, found), "run": whole(found).as_json(), "epochs": of_epochs}


def lines(passes: Sequence[Pass]) -> list[str]:
    """Return the whole run as lines of text: each epoch, pauses and restarts, and the run as a whole."""
    found = epochs(passes)
    shown = []
    for epoch in found:
        if text := _pause(epoch):
            shown.append(f"-- {text}")
        shown += [f"epoch {epoch.name}: {epoch.total.line()}{_end(epoch)}", *(f"   {line}" for line in epoch.late())]
    total = whole(found)
    waits = filter(None, [_waits(total)])
    return [*shown, f"{_extent(passes, found)}: {total.line()}", *waits, *notes(passes, found)]


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
    total = whole(found)
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
<p>{_extent(passes, found)}:</p>
<p class="advice">{escape(total.line())}. {escape(_waits(total))}</p>
{"".join(f'<p class="advice">{escape(note)}</p>' for note in notes(passes, found))}
<div class="plots">
{figures}</div>
{_overview(found)}
{tables}
<p><small>Totals sum rows and bytes over all ranks and average seconds. Percentiles are of the waits for single batches,
over all ranks, to within 26 %. A rank is marked if it waited for data or
computed longer than the median rank, by more than a twentieth of the epoch: in synchronous training the others waited
for it.
</small></p>
</body>
</html>
"""


def _extent(passes: Sequence[Pass], found: Sequence[Epoch]) -> str:
    """Return how long a run took, and on how many ranks: "2 epochs (1 begun again) on 4 ranks in 66 s, 1 restart"."""
    numbers = Counter(epoch.number for epoch in found)
    again = sum(times > 1 for times in numbers.values())
    restarts = sum(epoch.restarted for epoch in found)
    ranks, seconds = len({record.rank for record in passes}), max(record.until for record in passes) - found[0].began
    text = counted(len(numbers), "epoch") + (f" ({again} begun again)" if again else "")
    text += f" on {counted(ranks, 'rank')} in {duration(seconds)}"
    return text + (f", {counted(restarts, 'restart')}" if restarts else "")


def _waits(stats: LoaderStats) -> str:
    """Return the quantiles of the waits for a batch; "" without batches."""
    if not stats.batches:
        return ""
    p50, p95, p99, longest = (precise(getattr(stats, name)) for name in QUANTILES)
    return f"Waits for a batch: half up to {p50}, 95 % up to {p95}, 99 % up to {p99}, the longest {longest}"


def _pause(epoch: Epoch) -> str:
    """Return what came before an epoch, if it was a restart or a long time: "restarted after 3 min"."""
    if epoch.restarted:
        return f"restarted after {duration(epoch.pause)}"
    return f"nothing for {duration(epoch.pause)}" if epoch.pause > PAUSE else ""


def _end(epoch: Epoch) -> str:
    """Return what is unusual about an epoch: that it was begun again, or has not ended."""
    again = f", begun again ({epoch.restarts})" if epoch.restarts else ""
    return again if epoch.ended else f"{again}, not ended"


def _overview(found: Sequence[Epoch]) -> str:
    """Return a table of all epochs, with pauses and restarts between them."""
    headings = ["epoch", "after", "seconds", "rows", "rows/s", "waiting", "mostly on", "p50", "p95", "p99", "longest"]
    headings += ["hits", "from origin", "stragglers"]
    rows = ""
    for epoch in found:
        total, late = epoch.total, [str(rank) for rank in epoch.stragglers()]
        if text := _pause(epoch):
            rows += f'<tr class="pause"><td colspan="{len(headings)}">{text}</td></tr>\n'
        cells = [
            *(f"{epoch.name}{'' if epoch.ended else ', not ended'}", duration(epoch.began - found[0].began)),
            *(f"{total.seconds:,.1f}", f"{total.rows:,}", f"{total.rows_per_second:,.0f}"),
            *(
                f"{total.stall_fraction:.1%}",
                max(total.waits, key=total.waits.__getitem__) if any(total.waits.values()) else "",
            ),
            *(precise(getattr(total, name)) for name in QUANTILES),
            *(_hits(total), decimal(int(total.bytes_origin)), few(late, MOST_NAMED)),
        ]
        rows += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
    return f"""<div class="wide"><table>
<tr>{"".join(f"<th>{heading}</th>" for heading in headings)}</tr>
{rows}</table></div>"""


def _hits(stats: LoaderStats) -> str:
    return f"{stats.hit_rate:.1%}" if stats.hits + stats.misses else "\N{EN DASH}"


def _epoch(epoch: Epoch, *, opened: bool) -> str:
    late = epoch.stragglers()
    causes = [cause for cause in CAUSES if epoch.total.waits[cause]]
    rows = "".join(_row(record, causes, late=rank in late) for rank, record in epoch.ranks.items())
    headings = [
        "rank",
        "host",
        "rows",
        "rows/s",
        "seconds",
        "waiting",
        "p99",
        "longest",
        *(f"on {cause}, s" for cause in causes),
    ]
    headings += ["hits", *(f"from {tier}" for tier in TIERS)]
    return f"""<details{" open" if opened else ""}>
<summary>{escape(str(epoch.total))}{_end(epoch)}</summary>
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
        *(f"{stats.stall_fraction:.1%}", precise(stats.wait_p99), precise(stats.wait_max)),
        *(f"{stats.waits[cause]:,.1f}" for cause in causes),
        _hits(stats),
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
