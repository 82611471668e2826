"""A function behind what has run of a call that cannot be captured runs as it is written.

What ran ahead of it has written into tensors and Python's objects, and may have printed or drawn:
that the call as a whole began anew would do so twice. Dynamo runs each function that it gives no
code for as Python does; here it does where it would have raised.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call"
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch._dynamo.convert_frame import ConvertFrame
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

from fxrl.capture._torch import capture_no_more, dynamo_settings, try_again
from fxrl.scoped import swapped

_convert = ConvertFrame.__call__
_AS_WRITTEN = FrameExecStrategy(FrameAction.RUN_ONLY, FrameAction.DEFAULT)


@contextmanager
def as_written_behind(
    root: CodeType,
    known: Iterable[CodeType],
    look: Callable[[Mapping[str, Any]], None],
    is_raised: Callable[[Exception], bool],
    otherwise: Callable[[Exception], Mapping[str, Any] | None],
) -> Iterator[list[tuple[CodeType, Exception]]]:
    """Inside, functions whose capture fails run as they are written, but for the one that is
    called.

    Args:
        root: the code of that one.
        known: what is not captured any more; what was captured of it runs on.
        look: is given the arguments of each other one ahead of its capture.
        is_raised: of which failures this is not so.
        otherwise: settings of Dynamo to try a function with that has failed, if there are some.

    Yields:
        What runs as it is written, and why; what is raised, too.
    """
    failed: list[tuple[CodeType, Exception]] = []
    thread = threading.get_ident()

    def convert(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if frame.f_code is root or threading.get_ident() != thread:  # of another compiler
            return _convert(self, frame, *args, **kwargs)
        look(frame.f_locals)
        settings: list[Mapping[str, Any]] = [{}]
        for tried in settings:  # which grows
            try:
                with dynamo_settings(tried):
                    return _convert(self, frame, *args, **kwargs)
            except Exception as error:
                more = otherwise(error)
                if more is None or more in settings:
                    failed.append((frame.f_code, error))
                    if is_raised(error):
                        raise
                else:
                    settings.append(more)
        return ConvertFrameReturn(_AS_WRITTEN, apply_to_code=False)

    codes = list(known)
    for code in codes:
        capture_no_more(code)
    try:
        with swapped(ConvertFrame, __call__=convert):
            yield failed
    except BaseException:
        failed.clear()  # errors have the frames that hold this
        raise
    finally:
        for code in codes:  # other steps, and other compilers, may capture it
            try_again(code)
