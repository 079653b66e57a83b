"""Takes both sides apart on recorded responses: trainer passes compared with one engine pass,
one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.bisect.grafting import Grafts
from mismatch_cli.bisect.modules import ALL, IsolatedModule, ModuleFindings
from mismatch_cli.models.dissection.engine_pass import EnginePass
from mismatch_cli.models.dissection.listener import Listener
from mismatch_cli.models.dissection.model_parts import KINDS, Part, match_parts
from mismatch_cli.models.engines import Engine, OpenEngine
from mismatch_cli.models.scoring.head import Head
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.models.sharding import decoder_of, is_spread, without_gradients

_ROWS = 64  # tokens whose logits of both sides are in memory at a time
_NO_COUNTERPART = "the engine has no counterpart"


class Response(Protocol):
    """A recorded response, to be read again."""

    @property
    def prompt_ids(self) -> list[int]: ...

    @property
    def response_ids(self) -> list[int]: ...


def graft(
    engine: Engine,
    trainer: Trainer,
    responses: Sequence[Response],
    on_done: Callable[[int], None] = lambda _: None,
) -> ModuleFindings:
    """Take both sides apart on these responses, such as those from `choose_responses`; calls
    `on_done` for each.

    Raises a `MismatchError` where that is impossible; `missing` names what could not be compared.
    """
    check_open(engine, trainer)
    findings = ModuleFindings()
    for response in responses:
        request = ScoreRequest(list(response.prompt_ids), list(response.response_ids))
        with cast(OpenEngine, engine).pass_over(
            (request.prompt_ids + request.response_ids)[:-1]
        ) as engine_pass:
            _Dissection(engine_pass, trainer, request, findings).run()
        on_done(1)
    _settle(findings)
    return findings


def _settle(findings: ModuleFindings) -> None:
    """Leave out kinds that produced no numbers for some response, and name them."""
    responses = len(findings.logp_trainer)
    for columns in (findings.grafted, findings.alone):
        for kind in [kind for kind, logp in columns.items() if len(logp) < responses]:
            del columns[kind]
            findings.missing.append(
                f"{kind}: the engine's returns no numbers for the trainer's hidden states"
            )


def check_open(engine: Engine, trainer: Trainer) -> None:
    """Raise a `MismatchError` if either side cannot be taken apart."""
    if not hasattr(engine, "pass_over"):
        raise MismatchError(
            "The modules of a server are out of reach. To compare modules, run the engine in "
            "this process: --engine vllm or --engine hf."
        )
    if is_spread(trainer.model):
        raise MismatchError(
            "The trainer is sharded: each rank holds a part of every weight, so its modules "
            "cannot be compared with the engine's. Use one process."
        )


@dataclass
class _Dissection:
    """One response on both sides."""

    engine: EnginePass
    trainer: Trainer
    request: ScoreRequest
    findings: ModuleFindings
    heard: Listener = field(init=False)  # of the trainer's own pass
    compared: set[str] = field(default_factory=set)  # kinds of modules

    def run(self) -> None:
        """Run the trainer's own pass, one that compares modules with the engine's, and one for
        each graft.
        """
        self._read_unchanged()
        pairs, unmatched = match_parts(self.heard.called, self.engine.heard.called)
        grafts = Grafts(self.engine, self.heard, pairs)
        self._compare(grafts)
        self._graft_kinds(grafts)
        findings = self.findings
        findings.missing = (
            findings.missing  # of an earlier response, since all run the same modules
            or _missing(self.heard.called, unmatched, grafts.refused, self.compared)
            or self._coarse_stream(grafts)
        )

    def _read_unchanged(self) -> None:
        """log μ of the engine's pass, log π of the trainer's, and the streams of both."""
        first_row, ids_T = len(self.request.prompt_ids) - 1, torch.tensor(self.request.response_ids)
        self.findings.logp_prefill.append(self.engine.own_logp(first_row, ids_T).numpy())
        self.heard = Listener(self.trainer.model)
        with self.heard.on(decoder_of(self.trainer.model), lambda *_: True):
            self.findings.logp_trainer.append(self._score(()))
        self.findings.layers.add(self.engine.streams, self.heard.streams)

    def _compare(self, grafts: Grafts) -> None:
        """Compare every module's output with that of its counterpart on the same input."""
        with grafts.on(KINDS, self._isolate):
            self._forward(lambda hidden_TH, *_: self._compare_heads(hidden_TH))
        # The stream has no module; the trainer can round it to a coarser dtype, not to a finer one.
        if torch.finfo(grafts.stream_dtype).eps > torch.finfo(self._stream_dtype()).eps:
            self.compared.add("residual")

    def _graft_kinds(self, grafts: Grafts) -> None:
        outermost = _outermost(self.compared)
        for kind in KINDS:
            if kind in self.compared:
                self._graft(grafts, self.findings.grafted, kind, {kind})
        # Rounding errors do not add up: where many kinds round, one graft may remove nothing.
        # `alone`, all kinds but this one, says what the kind causes by itself.
        for kind in KINDS:
            if kind in outermost:
                self._graft(grafts, self.findings.alone, kind, outermost - {kind}, inner=False)
        # The trainer then computes with the engine's modules alone, in any two precisions.
        # A gap that is left, even of one bit, shows a part that `model_parts.py` does not see.
        self._graft(grafts, self.findings.grafted, ALL, outermost, inner=False)

    def _coarse_stream(self, grafts: Grafts) -> list[str]:
        """The line that says why the engine's stream could not be grafted; none if it could."""
        if torch.finfo(grafts.stream_dtype).eps >= torch.finfo(self._stream_dtype()).eps:
            return []
        coarse = str(self._stream_dtype()).removeprefix("torch.")
        return [
            f"residual: the trainer adds in {coarse}, which cannot represent the engine's stream"
        ]

    def _stream_dtype(self) -> torch.dtype:
        return self.heard.streams[-1]["mlp"][0].dtype

    def _graft(
        self,
        grafts: Grafts,
        into: dict[str, list[np.ndarray]],
        name: str,
        kinds: Collection[str],
        inner: bool = True,
    ) -> None:
        """Score a graft; a pass without numbers leaves its kind one response short, which
        `_settle` reports.
        """
        with grafts.on(kinds, inner=inner), suppress(MismatchError):
            into.setdefault(name, []).append(self._score(kinds))

    def _score(self, kinds: Collection[str]) -> np.ndarray:
        """log π, with the engine's head and sampler if `kinds` has them."""
        if "head" not in kinds:
            (scores,) = self.trainer.score([self.request], token_budget=1)
            return scores.logp_T
        logp_T: np.ndarray = self._forward(
            lambda hidden_TH, ids_T, _: self.engine.logp(hidden_TH, ids_T).numpy()
        )
        if np.isnan(logp_T).any():
            raise MismatchError(
                "The engine's head returns NaN for the trainer's hidden states. Look for NaN in the "
                "engine's weights."
            )
        return logp_T

    def _forward(self, use_hidden: Callable[[Tensor, Tensor, Head], Any]) -> Any:
        with without_gradients(self.trainer.model):
            return self.trainer.forward_pass([self.request], use_hidden)

    def _isolate(self, name: str, kind: str, engine: Tensor, trainer: Tensor) -> None:
        self.compared.add(kind)
        isolated = self.findings.isolated.setdefault(name, IsolatedModule(name, kind))
        isolated.add(engine, trainer)

    def _compare_heads(self, hidden_TH: Tensor) -> None:
        head = self.trainer.head
        for rows_TH in hidden_TH.split(_ROWS):
            theirs_TV = self.engine.logits(rows_TH)
            ours_TV = head.logits(rows_TH.to(head.weight_VH))
            width = min(theirs_TV.shape[-1], ours_TV.shape[-1])  # one of them may be padded
            self._isolate("head", "head", theirs_TV[:, :width], ours_TV[:, :width])


def _outermost(kinds: Collection[str]) -> set[str]:
    """These kinds without those nested in another: a grafted block brings its inner modules
    along.
    """
    inside = {"rotary": "attention", "router": "experts"}
    return {kind for kind in kinds if inside.get(kind) not in kinds}


def _missing(
    called: Sequence[Part], unmatched: Sequence[Part], refused: dict[str, str], compared: set[str]
) -> list[str]:
    """Which of the trainer's modules could not be compared, by kind."""
    kinds = {part.name: part.kind for part in called}
    # Rotations without a module of the engine are grafted as a function.
    reasons = {part.name: _NO_COUNTERPART for part in unmatched if part.kind != "rotary"} | refused
    lines = []
    for kind in KINDS:
        # A refusal may name the kind itself.
        names = [name for name in reasons if kinds.get(name, name) == kind]
        is_expected = kind in kinds.values() or kind in ("embedding", "head")
        if names:
            first = names[0]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"{kind}: {first}{more} ({reasons[first]})")
        elif is_expected and kind not in compared:
            lines.append(f"{kind}: {_NO_COUNTERPART}")
    return lines
