"""Recorded tokens in a Hugging Face model: force `generate` to choose them, or read the sequence
in one pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mismatch_cli.models.engines import ForcedResponse

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mismatch_cli.base.sampling import SamplingSettings

# Of logits to process together: float32 copies of all would be several times the logits
_ROWS = 256


class ForcingProcessor:
    """The last logits processor: shows another one the scores, and then leaves only the recorded
    token possible.

    A row that has ended reads `filler`, as in sampling.
    """

    def __init__(
        self,
        seen_by: Callable[[torch.Tensor, torch.Tensor], Any],
        batch: Sequence[ForcedResponse],
        filler: int,
    ) -> None:
        self._seen_by, self._step = seen_by, 0
        steps = max(len(response.response_ids) for response in batch)
        self._ids = [r.response_ids + [filler] * (steps - len(r.response_ids)) for r in batch]

    def __call__(self, input_ids: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        import torch

        self._seen_by(input_ids, scores_BV)
        ids_B1 = torch.tensor([[row[self._step]] for row in self._ids], device=scores_BV.device)
        self._step += 1
        return torch.full_like(scores_BV, float("-inf")).scatter_(1, ids_B1, 0.0)


def read_at_once(model: Any, response: ForcedResponse, sampling: SamplingSettings) -> np.ndarray:
    """Log μ of the response tokens, float32 [T], from one pass over this sequence alone.

    Its last token is not fed: what follows it is not needed.
    """
    import torch

    fed, tokens = response.prompt_ids + response.response_ids[:-1], len(response.response_ids)
    input_ids = torch.tensor([fed], device=model.device)
    last = (
        {"logits_to_keep": tokens}
        if "logits_to_keep" in inspect.signature(model.forward).parameters
        else {}
    )
    with torch.inference_mode():
        logits_TV = model(input_ids=input_ids, use_cache=False, **last).logits[0, -tokens:]
        ids_T1 = torch.tensor(response.response_ids, device=logits_TV.device)[:, None]
        parts = zip(logits_TV.split(_ROWS), ids_T1.split(_ROWS), strict=True)
        logps = [
            sampling.process(rows_NV).log_softmax(-1).gather(1, ids_N1)[:, 0]
            for rows_NV, ids_N1 in parts
        ]
    return torch.cat(logps).cpu().numpy()
