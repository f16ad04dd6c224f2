"""Print the lowest versions that pyproject.toml allows, as constraints for pip.

torch stays at the release that constraints.txt pins.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[.+\])?>=(?P<version>[\w.]+)")


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        lowest = REQUIREMENT.fullmatch(requirement)
        assert lowest, f"{requirement} has no plain lower bound"
        if lowest["name"] != "torch":
            print(f"{lowest['name']}=={lowest['version']}")
    print(*re.findall(r"^torch==.+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


if __name__ == "__main__":
    main()
