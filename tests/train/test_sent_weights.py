"""A trainer's weights as its engine has them: rounded, frozen ones too, and only for the time of a
measurement.
"""

from __future__ import annotations

import torch

from mismatch_cli.train.sent_weights import SentWeights


def test_a_model_is_measured_with_rounded_weights_and_then_has_its_own():
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.001, -0.3], [0.7, 2.002]]))
        model.bias.copy_(torch.tensor([0.1001, -3.003]))
    model.bias.requires_grad_(False)  # an engine rounds these as well
    as_sent = SentWeights(model, torch.bfloat16, adapter=False)
    before = as_sent.copy()
    with torch.no_grad():
        model.weight += 0.5
    own = [weight.detach().clone() for weight in model.parameters()]
    after = as_sent.copy()
    read = as_sent.measure_at(
        [before, after], lambda: [weight.detach().clone() for weight in model.parameters()]
    )
    for (weight, bias), sent in zip(read, (before, after), strict=True):
        assert torch.equal(weight, sent[0].float()) and weight.dtype == torch.float32
        assert torch.equal(bias, own[1].bfloat16().float()) and not torch.equal(bias, own[1])
    assert all(map(torch.equal, own, model.parameters()))
    assert as_sent.count_changes(before, after) == (4, 4)
    assert as_sent.count_changes(before, before) == (0, 4)
