"""Find sentences in comments, docstrings, messages and pages that are not plain English with standard terms.

`python tests/support/plain_english.py [PATH ...]` prints each finding as `path:line: phrase: text` and exits with 1 if
there is one. `make check` runs it over the whole tree. There are two kinds of findings:

- a sentence whose subject is a pronoun without a thing behind it, such as one that begins with "Whoever" or "Of those";
- a word of the private dialect that this project once had, where the field has a standard term.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SUBJECTS = (
    r"Who|Whoever|Whom|Whose|Nobody|Somebody|Those (?:that|who|of)|Of (?:a|an|the|those|these|what|all|which)|"
    r"What (?:is|was|are|were|has|had|of|comes|came|cannot|can|does|did|it|a|an|the|others?|this|they|ranks|each|makes|"
    r"fits|stays|goes|remains|takes|follows|passes)|Whether [^.]* kept"
)
WORDS = (
    r"allowance|rowblobs?|shelf|shelves|haste|whoever|nobody|somebody|lets? go of|(?:has|had|have) it made|stands? for|"
    r"(?:is|are|was|were) told|comes? to (?:a|the) step|(?:as|where) it lies|in a hurry|anew"
)
SENTENCE = re.compile(rf"(?:^|[.!?;:] +)((?:{SUBJECTS})\b)")
DIALECT = re.compile(rf"\b({WORDS})\b", re.IGNORECASE)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment and string of a module, or of each paragraph of a page."""
    if path.suffix == ".md":
        yield from paragraphs(path.read_text())
        return
    comment: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != last + 1:
                yield first, " ".join(comment)
                comment = []
            first, last = (first if comment else token.start[0]), token.start[0]
            comment.append(token.string.lstrip("# "))
        elif token.type == tokenize.STRING and " " in token.string:
            for line, text in paragraphs(token.string.lstrip("rRbBuUfF").strip("\"'")):
                yield token.start[0] + line - 1, text
    if comment:
        yield first, " ".join(comment)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each paragraph, list item and table row; code blocks are left out."""
    lines, first, code = list[str](), 1, False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        stripped = line.strip()
        fence = stripped.startswith("```")
        code ^= fence
        if code or fence or not stripped or re.match(r"[-*|#>]|\d+\.", stripped):
            if lines:
                yield first, " ".join(lines)
            lines = []
        if not (code or fence) and stripped:
            first = first if lines else number
            lines.append(stripped.lstrip("-*|#> "))


def findings(path: Path) -> Iterator[str]:
    """Yield the sentences of a file that a reader would have to translate."""
    for line, text in texts(path):
        for pattern in (SENTENCE, DIALECT):
            for match in pattern.finditer(text):
                around = text[match.start() : match.start() + 90]
                yield f"{path.relative_to(ROOT)}:{line}: {match.group(1)}: {around!r}"


def files(given: list[Path]) -> list[Path]:
    """Return the modules and pages of the project that are below the given paths; all of them without any."""
    command = ["git", "ls-files", "*.py", "*.md"]
    tracked = [ROOT / name for name in subprocess.check_output(command, cwd=ROOT, text=True).split()]
    return [
        file
        for file in tracked
        if file.is_file() and not file.is_symlink() and file != Path(__file__).resolve()
        if not given or any(file.is_relative_to(path.resolve()) for path in given)
    ]


def main() -> int:
    """Print all findings. Return 1 if there are any."""
    found = [line for file in files([Path(name) for name in sys.argv[1:]]) for line in findings(file)]
    print(*found, sep="\n")
    print(f"{len(found)} findings", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
