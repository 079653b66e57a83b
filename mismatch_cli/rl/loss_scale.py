"""Loss scaling for float16 gradients: a factor that halves when they overflow, and doubles after a long time."""

from __future__ import annotations

from typing import Any


class LossScale:
    """The factor on the loss; 1 and fixed where the dtype has float32's range.

    `growth_interval` finite steps double it (400 in the FP16 mismatch paper's runs), an overflow halves it.
    """

    def __init__(self, enabled: bool, initial: float = 2.0**16, growth_interval: int = 400) -> None:
        self.enabled, self.growth_interval = enabled, growth_interval
        self.value = initial if enabled else 1.0
        self.finite_steps = self.back_offs = 0

    @property
    def can_back_off(self) -> bool:
        """Whether a smaller factor could make an overflow go away: at 1 the gradients themselves are too large."""
        return self.enabled and self.value > 1

    def update(self, finite: bool) -> None:
        """Learn from one step whether its gradients were finite."""
        if not self.enabled:
            return
        if not finite:
            self.value /= 2
            self.finite_steps, self.back_offs = 0, self.back_offs + 1
            return
        self.finite_steps += 1
        if self.finite_steps % self.growth_interval == 0:
            self.value *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "finite_steps": self.finite_steps, "back_offs": self.back_offs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.finite_steps, self.back_offs = state["value"], state["finite_steps"], state["back_offs"]
