"""The policy-gradient loss from hidden states, with its gradient computed in the forward pass in
bounded memory.

It never holds sequence × vocabulary. Three matrix products in all, as many as autograd needs
through full logits. `_R` are the tokens of one row tile, `_U` those of them with a coefficient,
`_W` the vocabulary entries of one slice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head, score_hidden

# Tokens whose logits exist at once (lab/policy_gradient.py). Each tile reads and writes the
# gradient of the full weight, which on a GPU takes as long as computing its share.
_CPU_TILE, _GPU_TILE = 256, 2048
# How many of those the softmax takes at once: on a CPU, as many as fit the cache. This does not
# change a bit.
CPU_LOGITS, LEAST_CPU_ROWS, _GPU_ROWS = 1 << 17, 4, 256
SLICE = 8192  # vocabulary entries per backward product
_MOVED = 16  # rows to move at a time
# A logit of -inf: its probability is 0, and unlike with -inf their product is 0 as well
_NEVER = -1e30

CoefficientOf = Callable[[slice, Tensor], Tensor]


class LogpPass(NamedTuple):
    """What an earlier pass has measured of the tokens, in nats; all float32."""

    logp_N: Tensor
    entropy_N: Tensor
    logp_at_ids_NK: Tensor  # at the requested ids

    def of_tile(self, tile: slice) -> "LogpPass":
        return LogpPass(*(column_N[tile] for column_N in self))


class PolicyGradient(NamedTuple):
    """The loss, log π and entropy, in nats; all float32, or float64 if the head is."""

    # −Σ coefficient · log π; a scalar with gradients for hidden states, weight and bias
    loss: Tensor
    logp_N: Tensor  # without gradient
    entropy_N: Tensor  # without gradient


def policy_gradient_loss(
    hidden_NH: Tensor,
    head: Head,
    token_ids_N: Tensor,
    coefficient_of: CoefficientOf,
    sampling: SamplingSettings,
    row_tile: int | None = None,
    first_pass: LogpPass | None = None,
) -> PolicyGradient:
    """−Σ coefficient · log π with each coefficient a constant: d loss / d log π = −coefficient.

    `coefficient_of(tile, logp)` is called once per row tile, in order and without grad mode, as
    soon as log π of the tokens `tile` is known. A rule on whole responses runs `logp_pass` first
    and passes its result as `first_pass`: then log π and entropy are not computed again. Logits are
    computed as in `score_hidden`, so log π and entropy equal its own up to the rounding of a logit,
    which depends on the shape of the product. Tokens with coefficient 0 enter no backward product,
    whatever their logits.

    Logits exist for `row_tile` tokens at a time. The weight's gradient accumulates in float32 and
    is rounded to the weight's dtype after scaling by grad_output. Backward works once (the gradient
    is given away, not kept) and cannot be differentiated again. The entropy carries no gradient.
    """
    if sampling.truncates:
        raise ValueError(
            "The policy gradient needs the full support: top-p, top-k and min-p must be off."
        )
    hidden_NH = hidden_NH.to(head.weight_VH)
    token_ids_N = token_ids_N.to(hidden_NH.device, torch.int64)
    if row_tile is None:
        row_tile = _CPU_TILE if hidden_NH.device.type == "cpu" else _GPU_TILE
    arguments = _Arguments(
        head,
        token_ids_N,
        coefficient_of,
        sampling.temperature,
        row_tile,
        torch.is_grad_enabled(),
        first_pass,
    )
    return PolicyGradient(
        *_GradientInForward.apply(hidden_NH, head.weight_VH, head.bias_V, arguments)
    )


def logp_pass(
    hidden_NH: Tensor,
    head: Head,
    token_ids_N: Tensor,
    sampling: SamplingSettings,
    query_ids_NK: Tensor | None = None,
) -> LogpPass:
    """log π and entropy of every token, for coefficients that depend on whole responses or on other
    tokens.

    This is a fourth product; with `query_ids_NK` also log π at those ids.
    """
    if query_ids_NK is None:
        query_ids_NK = token_ids_N.new_empty(len(token_ids_N), 0)
    scores = score_hidden(hidden_NH.detach(), head, token_ids_N, query_ids_NK, sampling)
    # Autograd does not accept tensors of inference mode, so these are copies.
    return LogpPass(scores.logp_T.clone(), scores.entropy_T.clone(), scores.logp_at_ids_TK.clone())


@dataclass(frozen=True)
class _Arguments:
    """The arguments of the loss that autograd need not see."""

    head: Head
    token_ids_N: Tensor
    coefficient_of: CoefficientOf
    temperature: float
    row_tile: int
    grad_enabled: bool  # the caller's: inside an autograd function it is always off
    first_pass: LogpPass | None


class _GradientInForward(torch.autograd.Function):
    """Autograd functions take and return single tensors; weight and bias are arguments for
    autograd's sake.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, arguments: _Arguments
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums: list[Tensor | None] = []
        inputs = (hidden_NH, weight_VH, bias_V)
        for tensor, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True):
            if tensor is None or not (arguments.grad_enabled and needed):
                sums.append(None)
            else:
                sums.append(_zeros(tensor))
        gradients = WantedGradients(*sums)
        result = _loss_and_gradients(hidden_NH, arguments, gradients)
        ctx.gradients = gradients
        ctx.dtype = weight_VH.dtype
        ctx.mark_non_differentiable(result.logp_N, result.entropy_N)
        return result.loss, result.logp_N, result.entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError(
                "This policy-gradient loss has already been differentiated: backward works once."
            )
        # The sums are given away: without another reference, `.grad` takes their memory.
        ctx.gradients = None
        scaled = [None if x is None else x.mul_(grad_loss).to(ctx.dtype) for x in gradients]
        return (*scaled, None)


class WantedGradients(NamedTuple):
    """Sums of d loss / d input; None where not needed."""

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are float32, except for a float64 head."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=_sum_dtype(like.dtype), device=like.device)


def _loss_and_gradients(
    hidden_NH: Tensor, arguments: _Arguments, gradients: WantedGradients
) -> PolicyGradient:
    """Loss, log π and entropy; adds each tile's share to the gradients."""
    count = len(hidden_NH)
    logp_N = _zeros(hidden_NH[:, 0])
    entropy_N = torch.zeros_like(logp_N)
    loss = logp_N.new_zeros(())
    logits_RV = hidden_NH.new_empty(min(arguments.row_tile, count), arguments.head.vocabulary)
    tiles = GradientTiles(arguments.head, arguments.temperature, logits_RV)
    for start in range(0, count, arguments.row_tile):
        tile = slice(start, min(start + arguments.row_tile, count))
        first_pass = arguments.first_pass
        if first_pass is not None:
            first_pass = first_pass.of_tile(tile)
        logp_N[tile], entropy_N[tile], slope_RV = tiles.forward(
            hidden_NH[tile], arguments.token_ids_N[tile], first_pass
        )
        logp_R = logp_N[tile]
        coefficient_R = arguments.coefficient_of(tile, logp_R).to(logp_R).expand_as(logp_R)
        active_U = coefficient_R.nonzero()[:, 0]
        if len(active_U):
            coefficient_U = coefficient_R[active_U]
            loss -= coefficient_U @ logp_R[active_U]
            tiles.backward(gradients, slope_RV, hidden_NH, coefficient_U, active_U, start)
    return PolicyGradient(loss, logp_N, entropy_N)


class GradientTiles:
    """Logits, log π, entropy and slopes, one row tile after the other in the same memory.

    The slope is −d log π / d (h Wᵀ + b) up to the constant `unit`, which combines divisor,
    multiplier and temperature: softmax − onehot, times the derivative of the cap. A float32 head's
    slopes replace its logits.
    """

    def __init__(self, head: Head, temperature: float, logits_RV: Tensor) -> None:
        self._head = head
        self._temperature = temperature
        self._unit = head.multiplier / (head.divisor * temperature)
        self._rows = _GPU_ROWS
        if logits_RV.device.type == "cpu":
            self._rows = max(LEAST_CPU_ROWS, CPU_LOGITS // head.vocabulary)
        dtype = _sum_dtype(logits_RV.dtype)
        self._logits_RV = logits_RV
        self._slope_RV = logits_RV
        if logits_RV.dtype != dtype:
            self._slope_RV = torch.empty_like(logits_RV, dtype=dtype)
        self.z_RV = torch.empty_like(logits_RV[: self._rows], dtype=dtype)
        self.cap_slope_RV = torch.empty_like(self.z_RV)

    def forward(
        self, hidden_RH: Tensor, ids_R: Tensor, first_pass: LogpPass | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log π, entropy and slopes of a tile; the slopes are valid until the next call."""
        slope_RV = self._slope_RV[: len(ids_R)]
        logits_RV = self._head.logits(hidden_RH, out=self._logits_RV[: len(ids_R)])
        if first_pass is not None and self._slopes_from_logp(first_pass.logp_N, logits_RV, ids_R):
            return first_pass.logp_N, first_pass.entropy_N, slope_RV
        chunks = zip(
            logits_RV.split(self._rows),
            slope_RV.split(self._rows),
            ids_R.split(self._rows),
            strict=True,
        )
        columns_R5 = torch.cat([self._softmax_sums(*chunk) for chunk in chunks])
        z_R, target_R, top_R, rest_R, weighted_R = columns_R5.T
        sum_R = rest_R + target_R  # 1, up to the rounding of softmax's own sum
        entropy_R = (sum_R / top_R).log() - (weighted_R + z_R.clamp(min=_NEVER) * target_R) / sum_R
        return logsigmoid(z_R + (top_R / rest_R).log()), entropy_R, slope_RV

    def backward(
        self,
        gradients: WantedGradients,
        slope_RV: Tensor,
        hidden_NH: Tensor,
        coefficient_U: Tensor,
        active_U: Tensor,
        start: int,
    ) -> None:
        """Add the share of the active tokens of a tile, which begins at `start`, to the gradients;
        overwrites its slopes.
        """
        slope_UV = _move_up(slope_RV, active_U)
        factor_U = self._unit * coefficient_U
        rows_U = active_U + start
        hidden_UH = hidden_NH[rows_U]
        if hidden_UH.dtype == torch.bfloat16:
            _add_bfloat16(
                gradients, self._head, slope_UV, self._logits_RV, hidden_UH, factor_U, rows_U
            )
        else:
            add_products(gradients, self._head, slope_UV, hidden_UH, factor_U, rows_U)

    def _slopes_from_logp(self, logp_R: Tensor, logits_RV: Tensor, ids_R: Tensor) -> bool:
        """Put softmax − onehot of an earlier pass's log π into the logits: exp(z − log Σ exp z),
        and π − 1 at the target; False if that is impossible.
        """
        # In half precision this product may round a logit differently from the pass before.
        # That would shift its whole row.
        if self._slope_RV is not self._logits_RV:
            return False
        log_sum_R = logits_RV.gather(1, ids_R[:, None])[:, 0] / self._temperature - logp_R
        if not torch.isfinite(log_sum_R).all():
            return False
        chunks = zip(
            logits_RV.split(self._rows),
            log_sum_R.split(self._rows),
            ids_R.split(self._rows),
            logp_R.split(self._rows),
            strict=True,
        )
        for z_CV, log_sum_C, ids_C, logp_C in chunks:
            cap_slope_CV = self.cap_slope_RV[: len(ids_C)]
            self._differentiate_cap(z_CV, cap_slope_CV)
            if self._temperature != 1:
                z_CV.div_(self._temperature)
            prob_CV = z_CV.sub_(log_sum_C[:, None]).exp_()
            prob_CV.scatter_(1, ids_C[:, None], logp_C.to(prob_CV).expm1()[:, None])
            if self._head.softcap is not None:
                prob_CV.mul_(cap_slope_CV)
        return True

    def _differentiate_cap(self, logits_RV: Tensor, cap_slope_RV: Tensor) -> None:
        """Compute the derivative of the cap, before the slopes replace the logits."""
        if self._head.softcap is not None:
            torch.div(logits_RV, self._head.softcap, out=cap_slope_RV).square_().neg_().add_(1)

    def _softmax_sums(self, logits_RV: Tensor, slope_RV: Tensor, ids_R: Tensor) -> Tensor:
        """Five columns: z and π of the target, π of the most probable token; Σ π and Σ zπ of all
        but the target. Also puts the slopes into `slope_RV`.

        z is relative to the largest logit. As in RunningRows, the target stays out of the sums: 1 −
        π then keeps its relative precision where π is nearly 1.
        """
        z_RV = self.z_RV[: len(ids_R)]
        cap_slope_RV = self.cap_slope_RV[: len(ids_R)]
        ids_R1 = ids_R[:, None]
        z_RV.copy_(logits_RV)
        self._differentiate_cap(logits_RV, cap_slope_RV)
        if self._temperature != 1:
            z_RV.div_(self._temperature)
        z_R1 = z_RV.sub_(z_RV.amax(dim=1, keepdim=True)).gather(1, ids_R1)
        prob_RV = torch.softmax(z_RV.clamp_(min=_NEVER), dim=1, out=slope_RV)
        top_R1 = prob_RV.amax(dim=1, keepdim=True)
        target_R1 = prob_RV.gather(1, ids_R1)
        prob_RV.scatter_(1, ids_R1, 0.0)
        rest_R1 = prob_RV.sum(dim=1, keepdim=True)
        weighted_R1 = z_RV.mul_(prob_RV).sum(dim=1, keepdim=True)
        slope_RV.scatter_(1, ids_R1, -rest_R1)
        if self._head.softcap is not None:
            slope_RV.mul_(cap_slope_RV)
        return torch.cat([z_R1, target_R1, top_R1, rest_R1, weighted_R1], dim=1)


def _move_up(slope_RV: Tensor, active_U: Tensor) -> Tensor:
    """Move the active rows, in order, to the top of the same memory."""
    if len(active_U) < len(slope_RV):
        # A row never moves down, nor onto one not yet moved
        for start in range(0, len(active_U), _MOVED):
            sources_U = active_U[start : start + _MOVED]
            slope_RV[start : start + len(sources_U)] = slope_RV[sources_U]
    return slope_RV[: len(active_U)]


def add_products(
    gradients: WantedGradients,
    head: Head,
    slope_UV: Tensor,
    hidden_UH: Tensor,
    coefficient_U: Tensor,
    rows_U: Tensor,
) -> None:
    """The two backward products, slice by slice of the vocabulary.

    Both are float32 products, for float16 too: its rounding errors would add up, and small
    gradients would leave its range before grad_output can scale them.
    """
    coefficient_U1 = coefficient_U[:, None]
    weighted_UH = hidden_UH * coefficient_U1
    back_UH = torch.zeros_like(weighted_UH)
    for start in range(0, head.vocabulary, SLICE):
        ids = slice(start, start + SLICE)
        slope_UW = slope_UV[:, ids]
        if gradients.hidden_NH is not None:
            back_UH.addmm_(slope_UW, head.weight_VH[ids].to(slope_UW.dtype))
        if gradients.weight_VH is not None:
            gradients.weight_VH[ids].addmm_(slope_UW.T, weighted_UH)
        if gradients.bias_V is not None:
            gradients.bias_V[ids].addmv_(slope_UW.T, coefficient_U)
    if gradients.hidden_NH is not None:
        gradients.hidden_NH[rows_U] = back_UH.mul_(coefficient_U1)


def _add_bfloat16(
    gradients: WantedGradients,
    head: Head,
    slope_UV: Tensor,
    logits_RV: Tensor,
    hidden_UH: Tensor,
    coefficient_U: Tensor,
    rows_U: Tensor,
) -> None:
    """The two backward products in bfloat16 with float32 sums, in the memory of slopes and logits.

    The slopes of the loss are rounded once, as autograd rounds them; the weight's gradient once all
    is added. On a CPU the hidden states' gradient is rounded here, and again by a grad_output that
    is not a power of two.
    """
    coefficient_U1 = coefficient_U[:, None]
    rounded_UV = logits_RV[: len(slope_UV)]
    if gradients.bias_V is not None:
        gradients.bias_V.addmv_(slope_UV.T, coefficient_U)
    if slope_UV.is_cuda:
        torch.mul(slope_UV, coefficient_U1, out=rounded_UV)
    else:
        rounded_UV.copy_(slope_UV.mul_(coefficient_U1))
    if gradients.hidden_NH is not None:
        gradients.hidden_NH[rows_U] = _product(rounded_UV, head.weight_VH)
    if gradients.weight_VH is not None:
        _add_product(gradients.weight_VH, slope_UV, rounded_UV, hidden_UH)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a · b in float32; only CUDA has such a product, others round it to bfloat16 on the way."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a, b).float()


def _add_product(sum_VH: Tensor, slope_UV: Tensor, rounded_UV: Tensor, hidden_UH: Tensor) -> None:
    """Add roundedᵀ · hidden; a CPU offers that product for float32 columns, which it rounds to
    bfloat16 itself.
    """
    if sum_VH.is_cuda:
        torch.addmm(sum_VH, rounded_UV.T, hidden_UH, out_dtype=torch.float32, out=sum_VH)
        return
    hidden_UH = hidden_UH.float()
    with _products_in_bfloat16():
        for start in range(0, len(sum_VH), SLICE):
            ids = slice(start, start + SLICE)
            sum_VH[ids].addmm_(slope_UV[:, ids].T, hidden_UH)


@contextmanager
def _products_in_bfloat16() -> Iterator[None]:
    """Let a CPU multiply float32 columns with its bfloat16 instructions; in float32 if it has
    none.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
