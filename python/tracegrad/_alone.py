"""tracegrad runs in Python's main interpreter alone: numpy and the compiled core exist once in a process.

Imported before everything else, so that any other interpreter is refused in words.
"""

try:
    import _interpreters
except ImportError:
    try:
        import _xxsubinterpreters as _interpreters  # until Python 3.12
    except ImportError:
        _interpreters = None

if _interpreters is not None and _interpreters.get_current() != _interpreters.get_main():
    raise ImportError(
        "tracegrad was imported in a sub-interpreter. numpy and the compiled core exist once in a process, and their "
        "memory would be shared without a lock. Use it in the main interpreter, in threads, or in processes."
    )
