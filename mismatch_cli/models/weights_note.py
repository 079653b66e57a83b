"""What a model's config.json says of its weights if they are not the published ones: for
manifests and reports.
"""

from collections.abc import Mapping
from typing import Any

KEY = "weights_note"  # in config.json and in manifests
_LONGEST = 200  # characters


def weights_facts(config: Any) -> dict[str, str]:
    """What a manifest records of the weights; empty if config.json says nothing."""
    note = getattr(config, KEY, None)
    if not isinstance(note, str) or not note:
        return {}
    return {KEY: note[:_LONGEST]}


def weights_sentence(rollout: Mapping[str, Any], trainer: Mapping[str, Any]) -> str:
    """One sentence for reports; empty if neither side has a note."""
    for side in (trainer, rollout):
        if side.get(KEY):
            return f"The weights of {side['model']} are {side[KEY]}."
    return ""
