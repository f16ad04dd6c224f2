"""Rows that other systems write to Parquet."""

ROWS = [
    {
        "id": row,
        "chat": [{"role": "user", "content": f"{row}é"}, {"role": "assistant", "content": None}][: row % 3],
        "tags": None if row == 1 else [f"t{tag}" for tag in range(row)],
        "lists": [[row], [], [row, row]],
        "name": None if row == 2 else f"row {row}",
        "score": None if row == 3 else row / 2,
    }
    for row in range(4)
]
