"""The routers of a Hugging Face mixture of experts: a hook records what they choose, or replaces
it.

`_N` are the rows of a pass (every token that the model reads, padding included), `_M` the layers
with a router, `_K` the experts of a token, `_E` all experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mismatch_cli.base.errors import MismatchError

LIVE = -1  # instead of an expert: the router decides by itself
_ROUTER = re.compile(r"Top_?[kK]Router$")
_LAYER = re.compile(r"\.(\d+)\.")
# Logits [N, E] and the chosen experts [N, K] → their weights [N, K]
Weigh = Callable[[Tensor, Tensor], Tensor]


def _of_all(logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    """Softmax over all experts (OLMoE)."""
    return logits_NE.softmax(-1, dtype=torch.float32).gather(1, chosen_NK)


def _of_all_to_1(logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    """Softmax over all experts, scaled to sum to 1 (Qwen3-MoE, Mixtral)."""
    weight_NK = _of_all(logits_NE, chosen_NK)
    return weight_NK / weight_NK.sum(-1, keepdim=True)


def _of_chosen(logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    """Softmax over the chosen experts, in the dtype of the logits (gpt-oss)."""
    return logits_NE.gather(1, chosen_NK).softmax(-1)


_WEIGHINGS: tuple[Weigh, ...] = (_of_all_to_1, _of_all, _of_chosen)


class Routers:
    """All routers of a model, in the order of its layers.

    A router returns `(logits [N, E], weights [N, K], experts [N, K])`; the way it computes weights
    from logits is found by reproducing its own weights, to the bit. Prescribed routes hold for
    every pass until they are replaced: a layer that is recomputed for its gradients must route as
    it did the first time.
    """

    def __init__(self, model: Any) -> None:
        self._modules: list[Any] = []
        self.layers: list[int] = []
        for name, module in model.named_modules():
            if _is_router(module):
                numbers = _LAYER.findall(name)
                self.layers.append(int(numbers[0]) if numbers else len(self._modules))
                self._modules.append(module)
        self.experts = max(map(_experts_of, self._modules), default=0)
        self.top_k = max((int(module.top_k) for module in self._modules), default=0)
        self._name = type(model).__name__
        self._weighings = [_WEIGHINGS] * len(self._modules)  # the possible ones of each router
        self._prescribed_NMK: Tensor | None = None
        self._last_choices: dict[int, tuple[Tensor, Tensor]] = {}  # experts and margins, by router
        self._hooks: list[Any] = []

    @classmethod
    def of(cls, model: Any) -> Routers | None:
        """The routers of a model; None if it has no known ones."""
        return cls(model) if any(map(_is_router, model.modules())) else None

    @classmethod
    def proven(cls, model: Any) -> Routers | None:
        """The routers of a model if their choices can be read, which a pass over one token
        shows; else None.
        """
        routers = cls.of(model)
        if routers is None:
            return None
        routers.listen()
        one_token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        try:
            with torch.inference_mode():
                model(input_ids=one_token, use_cache=False)
            routers.choices()
        # An unknown kind of router, or one that the pass did not reach.
        except (MismatchError, KeyError):
            routers.stop()
            return None
        return routers

    def listen(self) -> None:
        """Record what the routers choose from now on."""
        if self._hooks:
            return
        for place, module in enumerate(self._modules):
            self._hooks.append(module.register_forward_hook(partial(self._route, place)))

    def stop(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def describe(self) -> dict[str, Any]:
        """What a manifest records of the routers."""
        return {
            "num_experts": self.experts,
            "experts_per_token": self.top_k,
            "router_layers": list(self.layers),
        }

    def prescribe(self, routes_NMK: Tensor | None) -> None:
        """Route the next passes by `routes_NMK`; at `LIVE` entries, or with None, the routers
        decide.
        """
        self.listen()
        if routes_NMK is not None and routes_NMK.shape[2] != self.top_k:
            raise MismatchError(
                f"The engine sent each token to {routes_NMK.shape[2]} experts, but {self._name} "
                f"sends it to {self.top_k}, so the routes cannot be replayed. Leave out "
                "--replay-routes."
            )
        # Checkpointed layers compute again during backward, after the pass.
        # Routes stay until the next ones, or the second time the router would choose itself.
        self._prescribed_NMK = routes_NMK

    def choices(self) -> tuple[Tensor, Tensor]:
        """The routers' own choices in the last pass, prescribed or not: experts `[N, M, K]`, most
        likely first, and the margins `[N, M]`: the logit of the last chosen expert minus that of
        the first one left out.
        """
        chosen: list[Tensor] = []
        margins: list[Tensor] = []
        for place in range(len(self._modules)):
            chosen_NK, margin_N = self._last_choices[place]
            # Layers may be on several devices.
            device = chosen[0].device if chosen else chosen_NK.device
            chosen.append(chosen_NK.to(device))
            margins.append(margin_N.to(device))
        return torch.stack(chosen, 1), torch.stack(margins, 1)

    def _route(self, place: int, _module: Any, _inputs: Any, output: Any) -> Any:
        logits_NE, weight_NK, chosen_NK = self._unpack(output)
        self._last_choices[place] = _rank(logits_NE.detach(), chosen_NK.detach())
        if self._prescribed_NMK is None:
            return output
        prescribed_NK = self._prescribed_NMK[:, place].to(chosen_NK.device)
        weigh = self._weighing(place, logits_NE, weight_NK, chosen_NK)
        # Where both name the same experts nothing changes, not even the order of summation.
        differs_N = (prescribed_NK.sort(-1).values != chosen_NK.sort(-1).values).any(-1)
        rows_U = (differs_N & (prescribed_NK != LIVE).all(-1)).nonzero()[:, 0]
        if not len(rows_U):
            return output
        prescribed_UK = prescribed_NK[rows_U]
        weight_UK = weigh(logits_NE[rows_U], prescribed_UK).to(weight_NK.dtype)
        return (
            logits_NE,
            weight_NK.index_copy(0, rows_U, weight_UK),
            chosen_NK.index_copy(0, rows_U, prescribed_UK.to(chosen_NK.dtype)),
        )

    def _unpack(self, output: Any) -> Sequence[Tensor]:
        """Logits, weights and experts; a `MismatchError` if a router returns anything else."""
        if isinstance(output, tuple) and len(output) == 3 and output[1].shape == output[2].shape:
            return output
        raise MismatchError(
            f"The routers of {self._name} do not return logits, weights and experts, so their "
            "choices cannot be measured. Record without them: MISMATCH_ROUTES=false mismatch-cli "
            "probe."
        )

    def _weighing(
        self, place: int, logits_NE: Tensor, weight_NK: Tensor, chosen_NK: Tensor
    ) -> Weigh:
        """How this router weighs its experts; methods that agree on a few rows are told apart by
        later rows.
        """
        possible = self._weighings[place]
        if len(possible) > 1:
            equal = []
            with torch.no_grad():
                # A router is known only if recomputing its own weights gives the same bits.
                # Any other way to weigh experts would be a mismatch of our own.
                for weigh in possible:
                    if torch.equal(weigh(logits_NE, chosen_NK).to(weight_NK), weight_NK):
                        equal.append(weigh)
            possible = tuple(equal)
            self._weighings[place] = possible
        if not possible:
            raise MismatchError(
                f"{self._name} weighs experts in an unknown way, so routes cannot be replayed in "
                "it. Leave out --replay-routes."
            )
        return possible[0]


def _is_router(module: Any) -> bool:
    is_named_so = bool(_ROUTER.search(type(module).__name__))
    return is_named_so and hasattr(module, "top_k") and hasattr(module, "num_experts")


def _experts_of(router: Any) -> int:
    """The number of experts that a router chooses from; in LongCat-Flash some compute nothing."""
    return max(int(router.num_experts), int(getattr(router, "n_routed_experts", 0)))


def _rank(logits_NE: Tensor, chosen_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen experts by their logits, and the margin of the last one over the first one left
    out, float32.

    Infinite where all experts are chosen; NaN where the choice does not follow the largest logits,
    as with routers that choose by biased scores: their margins are not margins of logits.
    """
    k = chosen_NK.shape[1]
    order_NK = logits_NE.gather(1, chosen_NK).argsort(dim=-1, descending=True, stable=True)
    ranked_NK = chosen_NK.gather(1, order_NK)
    if k >= logits_NE.shape[1]:
        return ranked_NK, torch.full_like(logits_NE[:, 0], torch.inf, dtype=torch.float32)
    top_NK1 = logits_NE.float().topk(k + 1, dim=-1)
    by_logit_N = (top_NK1.indices[:, :k].sort(-1).values == chosen_NK.sort(-1).values).all(-1)
    margin_N = top_NK1.values[:, k - 1] - top_NK1.values[:, k]
    return ranked_NK, margin_N.where(by_logit_N | (margin_N == 0), torch.nan)
