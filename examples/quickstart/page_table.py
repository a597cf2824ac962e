"""Write a table of measurements into a page."""

import re
from pathlib import Path


def put_table(page: Path, name: str, lines: list[str]) -> None:
    """Replace the lines between `<!-- table: NAME -->` and `<!-- end -->` of a page.

    Raises:
        ValueError: if the page has no such place.
    """
    text = page.read_text(encoding="utf-8")
    marks = rf"(<!-- table: {re.escape(name)} -->\n\n).*?(\n\n<!-- end -->)"
    changed, count = re.subn(marks, lambda found: found[1] + "\n".join(lines) + found[2], text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(
            f"{page} has {count} places for the table {name}. Add <!-- table: {name} --> and <!-- end -->."
        )
    page.write_text(changed, encoding="utf-8")
