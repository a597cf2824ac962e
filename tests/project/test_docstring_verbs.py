"""Whether the docstrings of public functions and methods begin with a verb (docs: "Return", "Load", "Compute").

    PYTHONPATH=tools python tests/project/test_docstring_verbs.py

prints their share and those that do not. Properties and classes are described by nouns, and are left out.
"""

import ast

from sources import PACKAGE, package_files, parsed

# A word is added here by hand, and only if it is a verb that says what the function does.
_LIST = """
Accept Add Align Allocate Announce Answer Append Apply Assign Await
Broadcast Build
Call Cancel Change Check Choose Close Compare Compile Compute Concatenate Continue Convert Copy Correct Count
Create
Decode Delete Describe Detect Disable Discard Divide Do Download
Encode End Erase Estimate Evict
Filter Find Finish Fit Flatten Flush Format Free
Gather Group Guess
Import Insert
Judge
Keep Kill
Leave Let Limit List Load Lock Log Look
Make Measure Merge Move
Number
Open
Pack Parse Prepare Print Probe Process Publish Put
Queue
Raise Read Receive Recommend Recompute Record Redirect Refuse Register Reject Release Remember Remove Rename
Render Repeat Replace Reserve Reshard Restore Retry Return Roll Run
Sample Schedule Score Search Select Send Serve Set Show Silence Skip Sleep Split Start Stop Store Subtract
Switch Sync
Tell Test Train Turn
Update Upload Use
Verify
Wait Wrap Write
Yield
"""
VERBS = set(_LIST.split())


def is_property(function):
    return any(
        name in ast.unparse(decorator) for decorator in function.decorator_list for name in ("property", ".setter")
    )


def functions(body):
    """Yield the public functions of a module and the public methods of its public classes."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not node.name.startswith("_") and not is_property(node):
                yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions(node.body)
        elif isinstance(node, (ast.If, ast.Try)):
            yield from functions([*node.body, *node.orelse])


def first_words():
    """Return {place: first word} of all docstrings."""
    found = {}
    for path in package_files():
        for function in functions(parsed(path).body):
            if text := ast.get_docstring(function):
                found[f"{path.relative_to(PACKAGE)}:{function.lineno} {function.name}"] = text.split()[0].rstrip(",:;")
    return found


def test_docstrings_of_functions_begin_with_a_verb():
    words = first_words()
    others = {place: word for place, word in words.items() if word not in VERBS}
    assert len(words) > 1000
    assert len(others) <= 0.05 * len(words), others
    assert others == {}


def test_properties_and_private_functions_are_left_out():
    code = """
class Public:
    @property
    def name(self): "Noun."

    def close(self): "Close."

    def _close(self): "Noun."

class _Private:
    def close(self): "Noun."

def load(): "Load."
"""
    assert [function.name for function in functions(ast.parse(code).body)] == ["close", "load"]


def test_the_list_has_no_word_that_nothing_uses():
    assert VERBS - set(first_words().values()) == set()


if __name__ == "__main__":
    WORDS = first_words()
    OTHERS = {place: word for place, word in WORDS.items() if word not in VERBS}
    print(*(f"{place}: {word}" for place, word in OTHERS.items()), sep="\n")
    print(f"{len(WORDS) - len(OTHERS)} of {len(WORDS)} begin with a verb, {1 - len(OTHERS) / len(WORDS):.1%}")
