"""Every idiom of the catalogue: the expected verdict, and the numbers of eager mode."""

import pytest
import torch
import torch.nn.functional as F
from idioms import CASES, make_inputs
from judge import arguments, assert_same_numbers, assert_verdict, gradients, run_both

from tests.capture.mixer import sized

#: The one idiom that computes in low precision; float64 closeness means nothing there.
BF16 = "case_bf16_logsoftmax"


def test_the_catalogue_is_complete():
    assert len(CASES) == 61


@pytest.mark.parametrize("name", [name for name in CASES if name != BF16])
def test_idiom(name):
    case = CASES[name]
    outcome = run_both(case.fn, sized(case.fn, make_inputs))
    assert_verdict(outcome, fusable=not case.expected.startswith("not fusable"))
    assert_same_numbers(outcome)
    for leaf in case.grads:
        assert outcome.eager_grads[leaf] is not None, f"the idiom does not train {leaf}"


def test_bf16_idiom_is_no_further_from_the_truth_than_eager():
    """Two correct bf16 implementations differ by their roundings, so each is judged against the
    same loss in float64 over the same bf16 inputs. Gradients: no further away than eager's. Loss:
    ours rounds each log-prob once, to bf16's unit roundoff of 2**-8.
    """
    case = CASES[BF16]
    outcome = run_both(case.fn, make_inputs)
    assert_verdict(outcome, fusable=True)

    def exact(hidden, weight, ids, mask, adv):
        z = F.linear(hidden.bfloat16().double(), weight.bfloat16().double())[:, :-1]
        terms = -adv[:, None] * z.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return (terms * mask[:, 1:]).sum() / mask[:, 1:].sum(), terms.abs() * mask[:, 1:]

    batch = arguments(exact, make_inputs())
    truth, sizes = exact(**batch)
    assert abs(outcome.fused - truth) <= 2**-8 * sizes.sum() / batch["mask"][:, 1:].sum()
    for leaf, expected in gradients(truth, batch).items():
        ours = torch.linalg.vector_norm(outcome.fused_grads[leaf] - expected)
        theirs = torch.linalg.vector_norm(outcome.eager_grads[leaf] - expected)
        assert ours <= theirs, leaf
