"""Writes the Parquet files beside it, with pyspark and Java: `python write.py`. Spark 4.3.0 wrote those here."""

from __future__ import annotations

import shutil
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "support"))
from rows_of_writers import ROWS  # noqa: E402

NESTED = (
    "id long, chat array<struct<role: string, content: string>>, tags array<string>, lists array<array<long>>, "
    "name string, score double"
)
TYPES = (
    "time timestamp, price decimal(10,2), large decimal(30,2), day date, bytes binary, counts map<string, int>, "
    "yes boolean, small byte, half float"
)
VALUES = [
    (
        datetime(2020, 1, 2, 3, 4, 5, 6, UTC),
        Decimal("-12.50"),
        Decimal(10**27),
        date(1969, 12, 31),
        b"\0\xff",
        {"a": 1, "b": None},
        True,
        -128,
        0.5,
    ),
    (None,) * 9,
]


def write(frame: DataFrame, name: str) -> None:
    folder = HERE / "spark"
    frame.coalesce(1).write.parquet(str(folder))
    [part] = folder.glob("part-*.parquet")
    part.replace(HERE / f"{name}.parquet")
    shutil.rmtree(folder)


spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
for legacy in (False, True):
    spark.conf.set("spark.sql.parquet.writeLegacyFormat", str(legacy).lower())
    kind = "legacy" if legacy else "standard"
    write(spark.createDataFrame(ROWS, NESTED), f"nested-{kind}")
    write(spark.createDataFrame(VALUES, TYPES), f"types-{kind}")
spark.stop()
