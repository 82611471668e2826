"""Functions stay short: what one does is seen at a glance."""

import ast

from tests.test_layers import show, source_files

MOST = 60
#: Functions that are longer, and how long they may be: kernels, and parts that are put together.
LONGER = {
    "fxrl/kernels/decode_attention.py:attend": 125,
    "fxrl/kernels/hopper/rows.py:combine_blocks": 83,
}


def lines_of(function):
    """Lines without the docstring, which is no work to follow."""
    whole = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return whole
    return whole - (function.body[0].end_lineno - function.body[0].lineno + 1)


def test_functions_are_short():
    found = {
        f"{show(file)}:{node.name}": lines_of(node)
        for file in source_files()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    long = {name: lines for name, lines in found.items() if lines > LONGER.get(name, MOST)}
    assert not long, f"more than {MOST} lines: {long}"
