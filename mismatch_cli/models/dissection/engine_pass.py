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
from mismatch_cli.models.dissection.model_parts import Part, rotates_itself
from mismatch_cli.models.dissection.streams import Stream

_ROWS = 64  # tokens whose logits are in memory at a time


@dataclass(frozen=True)
class EnginePass:
    """What the engine computed for the tokens it read; its modules can be called within the `with`
    block of the pass.
    """

    heard: Listener
    hidden_NH: Tensor  # after the final norm
    sampling: SamplingSettings
    # Hidden states → logits, as the engine rounds, scales and caps them
    head: Callable[[Tensor], Tensor]
    positions_N: Tensor
    # The context that a module call needs, such as vLLM's forward context
    within: Callable[[], AbstractContextManager[Any]]

    @property
    def streams(self) -> list[dict[str, Stream]]:
        """The three points of each layer's residual stream."""
        return self.heard.streams

    def call_of(self, part: Part, time: int = 0) -> Call:
        """How the pass called a part the `time`-th time, or the last time if it did so less
        often.
        """
        calls = self.heard.calls[part.name]
        return calls[min(time, len(calls) - 1)]

    def call(self, part: Part, *tensors: Tensor, time: int = 0) -> Any:
        """Call the engine's module on other hidden states, as the pass called it."""
        with torch.inference_mode(), self.within():
            return self.call_of(part, time).repeat(*tensors)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """The engine's head on other hidden states."""
        with torch.inference_mode(), self.within():
            return self.head(hidden_TH.to(self.hidden_NH))

    def logp(self, hidden_TH: Tensor, ids_T: Tensor) -> Tensor:
        """Log-probs `[T]` float32 from the engine's head and sampler for these hidden states, in
        tiles of rows.
        """
        tiles = []
        for tile_NH, ids_N in zip(hidden_TH.split(_ROWS), ids_T.split(_ROWS), strict=True):
            logp_NV = self.sampling.process(self.logits(tile_NH)).log_softmax(-1)
            logp_N1 = logp_NV.gather(1, ids_N.to(logp_NV.device)[:, None])
            tiles.append(logp_N1[:, 0].float().cpu())
        return torch.cat(tiles)

    def own_logp(self, first_row: int, ids_T: Tensor) -> Tensor:
        """The engine's own log-probs of the tokens that the rows from `first_row` predict."""
        return self.logp(self.hidden_NH[first_row : first_row + len(ids_T)], ids_T)

    def route(self, part: Part, hidden: Tensor, time: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The engine router's logits, weights and experts for these hidden states."""
        answer = self.call(part, hidden, time=time)
        # transformers' routers return all three.
        if isinstance(answer, tuple) and len(answer) == 3 and answer[1].shape == answer[2].shape:
            return answer
        # vLLM's returns logits, and what dispatches the tokens selects experts by them.
        runner = self._runner(part)
        if runner is None:
            raise ShapesDiffer(f"how {type(part.module).__name__} chooses experts is unknown")
        logits_NE = first_tensor(answer)
        (form,) = self.call_of(part, time).hidden_forms.values()
        with torch.inference_mode(), self.within():
            weight_NK, chosen_NK = runner.router.select_experts(
                hidden_states=form.convert(hidden), router_logits=logits_NE
            )
        return logits_NE, weight_NK, chosen_NK

    def _runner(self, router: Part) -> Any:
        """What dispatches tokens to experts in a router's block, if it selects experts in its
        own function.
        """
        block_name = router.name.rpartition(".")[0]
        (block,) = (part.module for part in self.heard.parts.parts if part.name == block_name)
        experts = getattr(block, "experts", None)
        if not hasattr(getattr(experts, "router", None), "select_experts"):
            return None
        return experts

    def rotate(self, attention: Part, q_NAD: Tensor, k_NAD: Tensor) -> tuple[Tensor, Tensor] | None:
        """Queries and keys (tokens × heads × size) rotated by the rotary embedding of this
        attention.

        None if it has none that rotates by itself. For partial rotation, pass only the rotated part
        of each head.
        """
        rotary = next(filter(rotates_itself, attention.module.modules()), None)
        if rotary is None:
            return None
        (form, *_) = self.call_of(attention).hidden_forms.values()
        size = rotary.head_size
        with torch.inference_mode(), self.within():
            q = _flatten_heads(q_NAD.to(form.device, form.dtype), size)
            k = _flatten_heads(k_NAD.to(form.device, form.dtype), size)
            rotated_q, rotated_k = rotary(self.positions_N, q, k)
        return _unflatten_heads(rotated_q, q_NAD), _unflatten_heads(rotated_k, k_NAD)


def _flatten_heads(x_NAD: Tensor, size: int) -> Tensor:
    """Heads laid flat, zero-padded to the full head size: a copy, since rotation works in place."""
    return torch.nn.functional.pad(x_NAD, (0, size - x_NAD.shape[-1])).flatten(1).clone()


def _unflatten_heads(x: Tensor, like_NAD: Tensor) -> Tensor:
    """The heads of another tensor, without the padding."""
    tokens, heads, size = like_NAD.shape
    return x.view(tokens, heads, -1)[..., :size]
