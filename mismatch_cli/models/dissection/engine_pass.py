"""An engine's pass over one sequence, taken apart: its log-probs, its stream, and modules that
can be called again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.dissection.calls import Call, ShapesDiffer, first_tensor
from mismatch_cli.models.dissection.listener import Listener
from mismatch_cli.models.dissection.model_parts import Part, turns
from mismatch_cli.models.dissection.streams import Stream

_ROWS = 64  # tokens whose logits are in memory at a time


@dataclass(frozen=True)
class EnginePass:
    """What the engine computed for the tokens it read; its modules can be called within the `with`
    block of the pass.

    `within`: the context that a module call needs, such as vLLM's forward context.
    """

    heard: Listener
    hidden_NH: Tensor  # after the final norm
    sampling: SamplingSettings
    # Hidden states → logits, as the engine rounds, scales and caps them
    head: Callable[[Tensor], Tensor]
    positions_N: Tensor
    within: Callable[[], AbstractContextManager[Any]]

    @property
    def streams(self) -> list[dict[str, Stream]]:
        return self.heard.streams

    def call_of(self, part: Part, time: int = 0) -> Call:
        """How the pass called a part the `time`-th time."""
        calls = self.heard.calls[part.name]
        return calls[min(time, len(calls) - 1)]

    def call(self, part: Part, *tensors: Tensor, time: int = 0) -> Any:
        """Call the engine's module on other hidden states, as the pass called it."""
        with torch.inference_mode(), self.within():
            return self.call_of(part, time).again(*tensors)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """The engine's head on other hidden states."""
        with torch.inference_mode(), self.within():
            return self.head(hidden_TH.to(self.hidden_NH))

    def logp(self, hidden_TH: Tensor, ids_T: Tensor) -> Tensor:
        """Log-probs `[T]` float32 from the engine's head and sampler for these hidden states, in
        tiles of rows.
        """
        parts = []
        for rows_TH, tile_T in zip(hidden_TH.split(_ROWS), ids_T.split(_ROWS), strict=True):
            logp_TV = self.sampling.process(self.logits(rows_TH)).log_softmax(-1)
            parts.append(logp_TV.gather(1, tile_T.to(logp_TV.device)[:, None])[:, 0].float().cpu())
        return torch.cat(parts)

    def own_logp(self, first_row: int, ids_T: Tensor) -> Tensor:
        """The engine's own log-probs of the tokens that the rows from `first_row` predict."""
        return self.logp(self.hidden_NH[first_row : first_row + len(ids_T)], ids_T)

    def route(self, part: Part, hidden: Tensor, time: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The engine router's logits, weights and experts for these hidden states."""
        answer = self.call(part, hidden, time=time)
        if isinstance(answer, tuple) and len(answer) == 3 and answer[1].shape == answer[2].shape:
            return answer
        runner = self._runner(part)
        if runner is None:
            raise ShapesDiffer(f"how {type(part.module).__name__} chooses experts is unknown")
        logits_NE = first_tensor(answer)
        (flow,) = self.call_of(part, time).flows.values()
        with torch.inference_mode(), self.within():
            weight_NK, chosen_NK = runner.router.select_experts(
                hidden_states=flow.of(hidden), router_logits=logits_NE
            )
        return logits_NE, weight_NK, chosen_NK

    def _runner(self, router: Part) -> Any:
        """What dispatches tokens to experts in a router's block, if it selects experts in its
        own function.
        """
        block = router.name.rpartition(".")[0]
        (owner,) = (part.module for part in self.heard.parts.parts if part.name == block)
        experts = getattr(owner, "experts", None)
        return experts if hasattr(getattr(experts, "router", None), "select_experts") else None

    def rotate(self, attention: Part, q_NAD: Tensor, k_NAD: Tensor) -> tuple[Tensor, Tensor] | None:
        """Queries and keys (tokens × heads × size) rotated by the rotary embedding of this
        attention.

        None if it has none that rotates by itself. For partial rotation, pass only the rotated part
        of each head.
        """
        rotary = next(filter(turns, attention.module.modules()), None)
        if rotary is None:
            return None
        (flow, *_) = self.call_of(attention).flows.values()
        with torch.inference_mode(), self.within():
            whole = [
                _filled(x.to(flow.device, flow.dtype), rotary.head_size) for x in (q_NAD, k_NAD)
            ]
            turned = rotary(self.positions_N, *whole)
        pairs = zip(turned, (q_NAD, k_NAD), strict=True)
        return tuple(x.view(len(own), own.shape[1], -1)[..., : own.shape[2]] for x, own in pairs)


def _filled(x_NAD: Tensor, size: int) -> Tensor:
    """Heads laid flat, zero-padded to the full head size: a copy, since rotation works in place."""
    return torch.nn.functional.pad(x_NAD, (0, size - x_NAD.shape[-1])).flatten(1).clone()
