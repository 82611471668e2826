"""Rich tables as plain text, for ``str()`` and files."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Iterable

from rich.box import Box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

DEFAULT_WIDTH = 120  # columns where standard output is no terminal: files, pipes, notebooks

# A rule under the header and nothing else; ASCII, so that any file or log can hold it.
_RULE = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


class Readable:
    """What IPython and notebooks show as ``print`` does, and not by its ``repr``."""

    __slots__ = ()

    def _ipython_display_(self) -> None:
        print(self)


def plain_text(renderable: RenderableType, width: int | None = None) -> str:
    """``renderable`` without colour codes and trailing blanks, ``width`` columns wide (None: as the
    terminal, or ``DEFAULT_WIDTH`` without one)."""
    columns = terminal_width() if width is None else width
    file = io.StringIO()
    # force_* and color_system: whatever environment rich would consult, the text is the same.
    console = Console(
        file=file,
        width=columns,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
    )
    console.print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")


def folded(lines: Iterable[str], width: int | None = None, *, further: int = 4) -> str:
    """Lines of words, ``width`` columns wide (None: as ``plain_text``); what does not fit a line
    goes on below it, ``further`` in. A word that is longer than a line, such as a path, stays one.
    """
    columns = terminal_width() if width is None else width
    return "\n".join(
        textwrap.fill(
            line,
            columns,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + further),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines
    )


def terminal_width() -> int:
    """Columns of the terminal behind standard output, else ``DEFAULT_WIDTH``."""
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):  # a file or pipe; closed; none (pythonw)
        return DEFAULT_WIDTH


def open_table(*columns: str, right: tuple[str, ...] = (), fixed: tuple[str, ...] = ()) -> Table:
    """An empty table in fxrl's style, a rule under the header and no frame. Columns in ``right``
    are right-aligned (numbers), those in ``fixed`` never wrapped."""
    table = Table(box=_RULE, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name in fixed,
            overflow="fold",
        )
    return table


def cell(value: object, style: str = "") -> Text:
    """``value`` literally: brackets such as ``f32[4, 8]`` are no markup."""
    return Text(str(value), style=style)
