import math

import torch

from titan_like.loss import IGNORED, cross_entropy_sum


def test_sum_over_the_valid_labels_by_hand() -> None:
    # softmax of (0, ln 3) is (1/4, 3/4); of (0, 0) is (1/2, 1/2)
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0], [5.0, -5.0]]])
    loss = cross_entropy_sum(logits, torch.tensor([[0, 1, IGNORED]]))
    torch.testing.assert_close(loss, torch.tensor(math.log(4) + math.log(2)))


def test_computed_in_fp32_whatever_the_logits_are() -> None:
    logits = torch.full((1, 1, 1000), 1.0, dtype=torch.bfloat16)
    loss = cross_entropy_sum(logits, torch.tensor([[3]]))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.tensor(math.log(1000)), rtol=1e-6, atol=0)


def test_no_valid_label_is_zero_with_zero_gradients() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((2, 3), IGNORED))
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None and not logits.grad.any()
