"""Compare folders."""


def contents(folder):
    """Return the bytes of every file of a folder, by its path within it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
