"""From which step size on the weight sync finds what was not sent, by log-probs alone, with a real
vLLM.

    python -m lab.sync --model .real-model [--dtype bfloat16] [--lora] [--size 1e-5]

One step of one size for every weight, in the direction of a gradient's sign as AdamW's first step
makes it; then the engine gets all of it (right), nothing, all but one tensor, all but one layer,
all but the head, or another model. The table also says how many tensors differ when they are read
back, which needs no step size. fp8 and int8 stand for an engine that quantises: transformers in
bfloat16 with weights that are quantised and dequantised, per output channel.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.adapters import MergedAdapter, start_lora
from mismatch_cli.models.engines import EngineSettings, Request, create_engine
from mismatch_cli.models.loading import load_tokenizer
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.models.sharding import saved_state
from mismatch_cli.train.coefficients import LearnedResponse
from mismatch_cli.train.sent_weights import SentWeights
from mismatch_cli.train.sync import WeightSync, mean_gap

RESPONSES, TOKENS, BUDGET = 16, 64, 4096
SIZES = (1e-6, 1e-5, 1e-4, 1e-3)
QUANTISED = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
SAMPLING = SamplingSettings(temperature=1.0, max_tokens=TOKENS)


def quantised(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """A matrix after quantising and dequantising, with a scale for each output channel; other
    weights in bfloat16.
    """
    if weight.dim() != 2:
        return weight.bfloat16()
    dtype, largest = QUANTISED[kind]
    # A channel of zeros would divide by 0
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / largest
    scaled = weight.float() / scale
    scaled = scaled.round() if dtype == torch.int8 else scaled
    return (scaled.to(dtype).float() * scale).bfloat16()


class QuantisedAsSent(SentWeights):
    """As an engine that quantises holds the weights."""

    kind = "fp8"

    def _round(self, weight: torch.Tensor) -> torch.Tensor:
        return quantised(weight, self.kind)


class PartOf:
    """A model of which the engine gets only some new tensors; the others are those from before
    the step.
    """

    def __init__(self, model: Any, before: dict[str, torch.Tensor], stale: list[str]) -> None:
        self.learning = getattr(model, "learning", model)
        self._model, self._before, self._stale = model, before, stale

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._model.state_dict()) | {name: self._before[name] for name in self._stale}


class Another:
    """Weights that nobody trained."""

    def __init__(self, model: Any) -> None:
        self.learning, self._model = getattr(model, "learning", model), model

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: weight * 1.02 for name, weight in self._model.state_dict().items()}


def stale_parts(names: list[str]) -> dict[str, list[str]]:
    """What each planted fault leaves out; the layer in the middle stands for all."""
    layers = sorted({int(name.split(".")[2]) for name in names if name.startswith("model.layers.")})
    middle = f"model.layers.{layers[len(layers) // 2]}."
    head = [name for name in names if "lm_head" in name or "embed_tokens" in name]
    return {
        "nothing": names,
        "all but a layer": [name for name in names if name.startswith(middle)],
        "all but a tensor": [f"{middle}self_attn.o_proj.weight"],
        "all but the head": head,
    }


class Bench:
    """A trainer, an engine with a dtype, and the weights from before the step."""

    def __init__(self, model: str, dtype: str, lora: bool, log: Path) -> None:
        self.kind = dtype if dtype in QUANTISED else ""
        held = "bfloat16" if self.kind else dtype
        name = "hf" if self.kind else "vllm"
        extra = {} if self.kind else {"max_model_len": 512}
        self.engine: Any = create_engine(
            name, EngineSettings(model, SAMPLING, 0, held, 0, log, extra)
        )
        self.trainer = Trainer.load(model, sampling=SAMPLING, dtype="float32")
        self.model: Any = self.trainer.model
        if lora:
            start_lora(self.model, rank=8, alpha=16, targets="all-linear", seed=0)
            self.model = MergedAdapter(self.trainer.model)
        self.planted: Any = None
        self.held = getattr(torch, held)
        self.prompts = [
            load_tokenizer(model).encode(f"Question: What is {7 + i} plus {3 * i + 5}?\nAnswer:")
            for i in range(RESPONSES)
        ]
        self.direction = self._direction()

    def _direction(self) -> list[torch.Tensor]:
        """The sign of the gradient of the samples' log-prob; of an adapter, what makes B grow."""
        trained = self.trained()
        self.give(self.model)
        for sample in self.samples(1)[:4]:
            ids = torch.tensor([[*sample.rollout.prompt_ids, *sample.rollout.response_ids]])
            self.trainer.model(input_ids=ids, labels=ids).loss.backward()
        signs = [torch.zeros_like(w) if w.grad is None else w.grad.sign() for w in trained]
        for weight in trained:
            weight.grad = None
        return signs

    def trained(self) -> list[torch.Tensor]:
        return [weight for weight in self.trainer.model.parameters() if weight.requires_grad]

    @torch.no_grad()
    def move(self, size: float) -> None:
        for weight, sign in zip(self.trained(), self.direction, strict=True):
            weight.sub_(sign * size)

    def give(self, model: Any) -> None:
        if not self.kind:
            self.engine.load_weights(model)
            return
        state = model.state_dict()
        with torch.no_grad():
            for name, own in self.engine.model.state_dict().items():
                own.copy_(quantised(state[name].detach(), self.kind))

    def samples(self, step: int) -> list[LearnedResponse]:
        requests = [Request(prompt, 1000 * step + i) for i, prompt in enumerate(self.prompts)]
        return [
            LearnedResponse(rollout, 1.0)
            for rollout in self.engine.sample(requests, lambda _: None)
        ]

    def sync(self) -> WeightSync:
        weights = self.model if isinstance(self.model, MergedAdapter) else None
        made = WeightSync(
            self.engine,
            self.trainer,
            exact=False,
            token_budget=BUDGET,
            dtype=self.held,
            weights=weights,
            every=1,
        )
        if self.kind:
            made._as_sent = QuantisedAsSent(
                self.trainer.model, self.held, adapter=weights is not None
            )
            made._as_sent.kind = self.kind
        return made

    def scores(self, samples: list[LearnedResponse]) -> list[Any]:
        requests = [ScoreRequest.of(sample.rollout) for sample in samples]
        return [score.logp_T for score in self.trainer.score(requests, token_budget=BUDGET)]

    def differing(self) -> str:
        """How many of the engine's tensors are not what the model has now."""
        if self.kind:
            return "–"
        state = saved_state(self.model)
        read = differ = 0
        for name, tensor in self.engine.weights():
            if isinstance(tensor, torch.Tensor):
                read += 1
                differ += not torch.equal(tensor, state[name].to(tensor))
        return f"{differ}/{read}"

    def rows(self, sizes: list[float]) -> Iterator[tuple[Any, ...]]:
        """Step size, what was sent, the answer, the gap to the weights as sent, the lag, and
        tensors that differ.
        """
        originals = [weight.detach().clone() for weight in self.trained()]
        for size in sizes:
            before = {
                name: weight.detach().clone() for name, weight in self.model.state_dict().items()
            }
            parts = stale_parts(list(before))
            for planted in ("right", *parts, "another model"):
                sync = self._sync_after_a_step()
                self.move(size)
                if planted in parts:
                    self.planted = PartOf(self.model, before, parts[planted])
                elif planted == "another model":
                    self.planted = Another(self.model)
                sync.load(2)
                differ, samples = self.differing(), self.samples(2)
                sync.score_before_update(2, samples)
                answer, lag = _answer(sync, samples, self.scores(samples))
                sent = sync._logp_sent or []
                mu = [sample.rollout.logp_rollout_T for sample in samples]
                yield size, planted, answer, mean_gap(mu[: len(sent)], sent), lag, differ
                self._put_back(originals)

    @torch.no_grad()
    def _put_back(self, originals: list[torch.Tensor]) -> None:
        for weight, value in zip(self.trained(), originals, strict=True):
            weight.copy_(value)

    def _sync_after_a_step(self) -> WeightSync:
        """A sync whose first step was right, and whose engine gets what is planted from now on."""
        sync = self.sync()
        sync._engine = self  # type: ignore[assignment]
        self.planted = None
        sync.load(1)
        samples = self.samples(1)
        sync.score_before_update(1, samples)
        sync.prove(1, samples, self.scores(samples))
        return sync

    def load_weights(self, model: Any) -> None:
        """The engine that the sync knows: it gets what is planted."""
        self.give(self.planted or model)


def _answer(
    sync: WeightSync, samples: list[LearnedResponse], scores: list[Any]
) -> tuple[str, dict[str, Any]]:
    """What the sync says of its second step, and what rounding swallowed."""
    try:
        proof = sync.prove(2, samples, scores)
    except MismatchError as error:
        return ("FOUND (older)" if "earlier step" in str(error) else "FOUND (gap)"), {}
    return proof["sync"], proof["rounding"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".real-model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--size", type=float, action="append")
    parser.add_argument("--log", type=Path, default=Path("sync-engine.log"))
    options = parser.parse_args()
    bench = Bench(options.model, options.dtype, options.lora, options.log)
    for size, planted, answer, gap, lag, differ in bench.rows(options.size or list(SIZES)):
        changed = lag.get("weights_changed")
        words = f"changed {changed:.3%} lag {lag['abs_dp_mean']:.2g}" if changed is not None else ""
        print(
            f"{options.dtype} {'lora' if options.lora else 'full'} {size:g} | {planted} | {answer} | "
            f"{gap:.2g} | {differ} | {words}",
            flush=True,
        )


if __name__ == "__main__":
    main()
