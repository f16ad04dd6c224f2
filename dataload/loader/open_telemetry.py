"""Offers the metrics of this process's loaders to OpenTelemetry, whose readers ask for them when they export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

from opentelemetry.metrics import CallbackOptions, Observation, get_meter

from dataload.loader.loader_metrics import measured
from dataload.telemetry.loader_stats import QUANTILES
from dataload.telemetry.metrics import COUNTERS, GAUGES, Series, Value

LABELS = dict(zip(QUANTILES, ("0.5", "0.95", "0.99", "1"), strict=True))


@cache
def offer() -> None:
    """Make the instruments. Before the program chooses its meter provider, OpenTelemetry keeps them for it."""
    meter = get_meter("dataload")
    for name, (text, label, value) in COUNTERS.items():
        callbacks = [_observing(partial(_counts, label, value))]
        meter.create_observable_counter(f"dataload.{name}", callbacks, _unit(name), text)
    for name, text in GAUGES.items():
        meter.create_observable_gauge(f"dataload.{name}", [_observing(partial(_gauge, name))], _unit(name), text)
    text = "Quantiles of the times that the loop waited for a batch."
    meter.create_observable_gauge("dataload.wait", [_observing(_quantiles)], "s", text)


def _observing(
    values: Callable[[Series], Iterable[tuple[float, dict[str, str]]]],
) -> Callable[[CallbackOptions], Iterator[Observation]]:
    """Return the callback of an instrument. values: returns the values of a rank and their own attributes."""

    def observations(_: CallbackOptions) -> Iterator[Observation]:
        for series in [each for loaders in [*measured.values()] for each in loaders.series()]:
            attributes = dict(zip(("loader", "rank"), series.labels, strict=True))
            yield from (Observation(value, attributes | own) for value, own in values(series))

    return observations


def _counts(label: str, value: Value, series: Series) -> Iterator[tuple[float, dict[str, str]]]:
    return ((count, {label: own} if label else {}) for own, count in value(series.total).items())


def _gauge(name: str, series: Series) -> Iterator[tuple[float, dict[str, str]]]:
    if name in series.gauges:
        yield series.gauges[name], {}


def _quantiles(series: Series) -> Iterator[tuple[float, dict[str, str]]]:
    return ((getattr(series.total, field), {"quantile": quantile}) for field, quantile in LABELS.items())


def _unit(name: str) -> str:
    """Return the unit of a metric, as UCUM writes it."""
    return "s" if name.endswith("seconds") else "By" if name.endswith("bytes") else "1"
