"""Recorded tokens in a Hugging Face model: force `generate` to choose them, or read the sequence
in one pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from mismatch_cli.models.engines import ForcedResponse

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mismatch_cli.base.sampling import SamplingSettings

# Rows of logits to process together: float32 copies of all would be several times the logits
_ROWS = 256


class ForcingProcessor:
    """The last logits processor of `generate`: it passes the scores to `recorder`, and then leaves
    only the recorded token possible.

    A row that has ended gets `filler`, as in sampling.
    """

    def __init__(
        self,
        recorder: Callable[[torch.Tensor, torch.Tensor], Any],
        batch: Sequence[ForcedResponse],
        filler: int,
    ) -> None:
        self._recorder = recorder
        ids_of_rows = [response.response_ids for response in batch]
        self._ids_of_steps = zip_longest(*ids_of_rows, fillvalue=filler)

    def __call__(self, input_ids: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        import torch

        self._recorder(input_ids, scores_BV)
        ids_B1 = torch.tensor(next(self._ids_of_steps), device=scores_BV.device)[:, None]
        return torch.full_like(scores_BV, float("-inf")).scatter_(1, ids_B1, 0.0)


def read_at_once(model: Any, response: ForcedResponse, sampling: SamplingSettings) -> np.ndarray:
    """Log μ of the response tokens, float32 [T], from one pass over this sequence alone.

    Its last token is not fed: what follows it is not needed.
    """
    import torch

    tokens = len(response.response_ids)
    fed = response.prompt_ids + response.response_ids[:-1]
    arguments: dict[str, Any] = {"input_ids": torch.tensor([fed], device=model.device)}
    # Most models can leave out the logits of the prompt, which would take most of the memory.
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = tokens
    logps = []
    with torch.inference_mode():
        logits_TV = model(**arguments, use_cache=False).logits[0, -tokens:]
        ids_T1 = torch.tensor(response.response_ids, device=logits_TV.device)[:, None]
        for logits_NV, ids_N1 in zip(logits_TV.split(_ROWS), ids_T1.split(_ROWS), strict=True):
            logp_NV = sampling.process(logits_NV).log_softmax(-1)
            logps.append(logp_NV.gather(1, ids_N1)[:, 0])
    return torch.cat(logps).cpu().numpy()
