"""Build the site of README, docs/ and the public names. Warnings are errors, and all links are checked.

    python .ci/site/build.py out/site

`make site` runs it. It imports nothing from the package, but reads the names in the `__all__` of each module.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

from links import wrong_links

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "tracegrad"
EXTRA_MODULES = ("metrics", "objective.presets", "trainer.token_log", "view")
"""Modules with a page that `import tracegrad` does not list."""
ABOUT = ("CHANGELOG.md", "CONTRIBUTING.md", "DESIGN.md", "PARITY.md", "SECURITY.md")


def public(path: Path) -> list[str]:
    """Return the names in `__all__` of a module, or its public classes and functions."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return [node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name[0] != "_"]


def modules() -> list[str]:
    """Return the modules among the names of the package, and `EXTRA_MODULES`."""
    return sorted(name for name in {*public(PACKAGE / "__init__.py"), *EXTRA_MODULES} if module(name).exists())


def module(name: str) -> Path:
    """Return the file of a module."""
    path = PACKAGE / name.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def api() -> dict[str, str]:
    """Return {name: page} for the package and each module: its docstring, then each public name."""
    own = [name for name in public(PACKAGE / "__init__.py") if name not in modules() and name != "__version__"]
    pages = {"tracegrad": _page("tracegrad", PACKAGE / "__init__.py", own)}
    for name in modules():
        names = [
            each
            for each in public(module(name))
            if not each.isupper() or name in ("objective", "objective.presets", "config")
        ]
        pages[f"tracegrad.{name}"] = _page(f"tracegrad.{name}", module(name), names)
    return pages


def _page(name: str, path: Path, names: list[str]) -> str:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    # Four spaces are code in a docstring of this package. A session after an empty line is a separate block.
    said = re.sub(r"(?m)(?:^    .*\n?|^\n(?=    (?!>>>)))+", lambda found: f"\n{_code(found[0])}\n", said)
    return "\n\n".join([f"# {name}", said, *(f"::: {name}.{each}" for each in names)]) + "\n"


def _code(indented: str) -> str:
    """Return code as a fence: a Python session if it begins with a prompt, otherwise Python if it parses, or text."""
    code = "\n".join(line.removeprefix("    ") for line in indented.strip("\n").split("\n"))
    if code.startswith(">>>"):
        return f"```pycon\n{code}\n```"
    try:
        ast.parse(code)
    except SyntaxError:
        return f"```text\n{code}\n```"
    return f"```python\n{code}\n```"


def stage(folder: Path) -> None:
    """Write all pages to `folder`/pages, and the options of the builder next to them."""
    pages = folder / "pages"
    (pages / "python").mkdir(parents=True)
    for picture in (*(ROOT / "docs").glob("*.png"), *(ROOT / "docs").glob("*.svg")):
        shutil.copy(picture, pages)
    start = (ROOT / "README.md").read_text(encoding="utf-8")
    _write(pages, Path("index.md"), start, ROOT)
    for page in [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ABOUT)]:
        _write(pages, _address(page), page.read_text(encoding="utf-8"), page.parent)
    shutil.copy(ROOT / ".ci" / "site" / "extra.css", pages)
    made = api()
    for name, text in made.items():
        (pages / "python" / f"{name}.md").write_text(text, encoding="utf-8")
    told = (ROOT / ".ci" / "site" / "zensical.toml").read_text(encoding="utf-8")
    listed = ", ".join(f'{{ "{name}" = "python/{name}.md" }}' for name in made)
    told = told.replace('{ "Python" = [] }', f'{{ "Python" = [{listed}] }}')
    for path in ("python", ".ci/site/docstrings.py"):
        told = told.replace(f'["{path}', f'["{ROOT / path}')
    (folder / "zensical.toml").write_text(told, encoding="utf-8")


def _address(page: Path) -> Path:
    """Return the path of a page in the site: that below docs/, or the name of a page of the root."""
    return page.relative_to(ROOT / "docs") if ROOT / "docs" in page.parents else Path(page.name)


def _write(pages: Path, address: Path, text: str, folder: Path) -> None:
    """Write a page, and copy the files that it links to. Lists and bars are as this builder's markdown needs them."""
    target, up = pages / address, "../" * (len(address.parts) - 1)
    target.parent.mkdir(exist_ok=True)

    def beside(found: re.Match[str]) -> str:
        path, part = (folder / found[1]).resolve(), found[2] or ""
        if path.parent == ROOT / "docs" and path.suffix in (".png", ".svg"):
            return f"]({up}{path.name}{part})"
        if path.suffix == ".md" and (path.parent == ROOT or ROOT / "docs" in path.parents) and path.name != "README.md":
            return f"]({up}{_address(path)}{part})"
        if not path.is_file() or ROOT not in path.parents or (target.parent / found[1]).exists():
            return found[0]
        copy = pages / "files" / path.relative_to(ROOT)
        copy = copy.with_name(f"{copy.name}.txt")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        return f"]({up}{copy.relative_to(pages)})"

    inside, lines = False, []
    for line in re.sub(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)", beside, text).split("\n"):
        inside ^= line.startswith("```")
        item = r"(- |\d+\. )"
        if not inside and re.match(rf" {{2,3}}{item}", line):
            line = f"    {line.lstrip()}"
        begins = not inside and re.match(item, line) and lines and lines[-1].strip()
        if begins and not re.match(rf"{item}|  ", lines[-1]):
            lines.append("")
        if not inside and line.startswith("|"):  # a bar in code parts no cells here
            line = re.sub(r"`[^`]*`", lambda found: found[0].replace("\\|", "|"), line)
        lines.append(line)
    target.write_text("\n".join(lines), encoding="utf-8")


def main(out: Path) -> int:
    """Write, build and check the site. Return 1 after printing the problems."""
    work = out.with_name(f"{out.name}-work")
    shutil.rmtree(work, ignore_errors=True)
    stage(work)
    builder = Path(sys.executable).with_name("zensical")
    command = [builder, "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=work, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    # --strict fails only on warnings of the builder itself.
    wrong = [line for line in done.stdout.splitlines() if "griffe" in line or "arning" in line]
    if done.returncode:
        wrong = [done.stdout]
    wrong = wrong or wrong_links(work / "site")
    print(*wrong, sep="\n", file=sys.stderr)
    if not wrong:
        shutil.rmtree(out, ignore_errors=True)
        (work / "site").rename(out)
        print(f"site     {out}/index.html")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
