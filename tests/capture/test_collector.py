"""The garbage collector is back on behind a captured step, whatever else is compiled meanwhile."""

import gc

from fxrl.capture._torch import callback_handler, compiles_undisturbed


def test_a_compilation_that_ends_behind_the_step_leaves_the_collector_on():
    with compiles_undisturbed():
        callback_handler.run_start_callbacks(None)  # of another thread
        assert not gc.isenabled()
    assert gc.isenabled()
