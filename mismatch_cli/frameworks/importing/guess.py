"""Guesses which columns of an unknown file are which of the plain schema, by names, types and
lengths.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from mismatch_cli.base.text import visible
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.naming import (
    OPEN,
    REQUIRED,
    RETOKENISED,
    Row,
    fits,
    known,
    responses,
)
from mismatch_cli.frameworks.importing.paths import EACH, paths_in

# Words in column names, as `_words` spells them.
PROMPT = ("prompt", "query", "context", "question", "input")
RESPONSE = (
    "response",
    "completion",
    "output",
    "out",
    "generated",
    "generation",
    "answer",
    "action",
)
_ROLLOUT = {
    *(
        "rollout",
        "sampling",
        "sampler",
        "sampled",
        "inference",
        "infer",
        "generation",
        "generated",
        "generator",
    ),
    *("behav", "behavior", "behaviour", "vllm", "sglang", "engine", "server", "mu"),
}
_OLD, _RECOMPUTED = {"old", "prev", "previous"}, {"recomputed", "recompute", "prox", "proximal"}
_TRAINER = {
    *(
        "trainer",
        "train",
        "training",
        "learner",
        "policy",
        "actor",
        "action",
        "current",
        "new",
        "pi",
    ),
    *("hf", "fsdp", "megatron"),
}
_SPELLINGS = {
    **dict.fromkeys(("logprob", "lp"), "logp"),
    **dict.fromkeys(("token", "tok", "idx", "index", "tokenid"), "id"),
    "adv": "advantage",
    "entropie": "entropy",
}
_LOG_PROBABILITY = re.compile(r"\blog (p|prob|probability|probabilitie|likelihood)\b")
_LOGP = ("logp_rollout", "logp_trainer", "logp_recomputed")
_GENERIC = {"id", "logp"}
_CONTAINERS = {"choice", "content", "data", "info", "meta", "token", "trajectory", "turn", "id"}
_FILLERS = {"per", "list", "array", "tensor", "the", "of"}

# Logs that hold only text: their title, the keys that identify them, and what to record instead.
_RECORDER = "mismatch_cli.Recorder in the training loop"
_TEXT_LOGS = (
    ("TRL's table of completions", {"step", "prompt", "completion", "advantage"},
     "mismatch_cli.frameworks.trl.record(trainer, folder) before trainer.train()"),
    ("verl's rollout data", {"input", "output", "score", "step"},
     "VERL_USE_EXTERNAL_MODULES=mismatch_cli.frameworks.verl.recorder and "
     "trainer.v1.trainer_mode=sync_recorded"),
    ("AReaL's rollout dump", {"task_id", "prompt", "completion", "head_version"}, _RECORDER),
    ("ms-swift's log of completions", {"prompt", "completion", "advantages"}, _RECORDER),
)  # fmt: skip
_CHATS = 3  # one more than the depth of a batch of conversations
_OTHER_TEXTS = ("a log of prompts and responses", _RECORDER)

# Other names of our columns, best first: the first entry that any column matches decides, if only
# one matches.
_NAMES: dict[str, tuple[str, ...]] = {
    "response_mask": ("|".join(f"{word} mask" for word in RESPONSE),),
    "prompt_mask": ("|".join(f"{word} mask" for word in PROMPT),),
    "loss_mask": ("loss mask", "id mask|train mask|assistant mask", "mask"),
    "advantage": ("advantage|id advantage",),
    "reward": ("reward", "score"),
    "prompt_id": ("prompt id", "group id|group|uid|problem id|question id|query id|example id"),
    "sample_index": ("sample id", "|".join(["sample", *(f"{word} id" for word in RESPONSE)])),
    "step": ("step", "global step|train step|training step", "iteration|iter|it"),
    "epoch": ("epoch",),
    "minibatch": ("minibatch|mini batch",),
    "finish_reason": ("finish reason|stop reason",),
    "version_rollout": ("version rollout", "weight version|policy version"),
    "version_trainer": ("version trainer",),
    "entropy_trainer": ("entropy trainer", "entropy"),
}


def guessed(rows: Sequence[Row], given: Mapping[str, str]) -> dict[str, str]:
    """The columns whose names differ from ours, with their names in the file; `given` ones stay.

    `OPEN` marks a column with several candidates, and a required one without any. Values inside
    objects are looked at only for these.
    """
    flat = _guessed(rows, given)
    if OPEN not in map(flat.get, REQUIRED):
        return flat
    inside = [{**row, **paths_in(row)} for row in rows]
    return _guessed(inside, {**flat, **given})


def _guessed(rows: Sequence[Row], sure: Mapping[str, str]) -> dict[str, str]:
    guess = _Guess(rows, {ours: its for ours, its in sure.items() if its != OPEN})
    guess.take("response_ids", guess.called("response_ids", [*_with_ids(*RESPONSE), "id"]))
    guess.rows = responses(rows, guess.found.get("response_ids", ""))
    for ours in known():
        guess.take(ours, guess.called(ours))
    guess.take("prompt_ids", guess.called("prompt_ids", _with_ids(*PROMPT)))
    guess.take_log_probabilities()
    for ours, names in _NAMES.items():
        guess.take(ours, guess.called(ours, names))
    guess.take("response_ids", guess.as_long_as("logp_rollout"))
    asked = dict.fromkeys(REQUIRED, OPEN) | guess.found
    in_order = dict.fromkeys([*REQUIRED, *known()])
    return {ours: asked[ours] for ours in in_order if asked.get(ours, ours) != ours}


class _Guess:
    """The columns found so far, and the names that are left."""

    def __init__(self, rows: Sequence[Row], found: dict[str, str]) -> None:
        self.rows, self.found = list(rows), found
        present = dict.fromkeys(name for row in rows for name in row)
        self.names = {name: _words_of_path(name) for name in present if _can_be_typed(name)}

    def take(self, ours: str, candidates: Sequence[str]) -> None:
        if candidates and ours not in self.found:
            self.found[ours] = candidates[0] if len(candidates) == 1 else OPEN

    def called(self, ours: str, lines: Iterable[str] = ()) -> list[str]:
        """The column with our name, or those that match the first entry of names that any column
        matches.
        """
        if ours in self.names and self._could_be(ours, ours):
            return [ours]
        for line in lines:
            wanted = {frozenset(name.split()) for name in line.split("|")}
            if found := [
                its
                for its, words in self.names.items()
                if words in wanted and self._could_be(ours, its)
            ]:
                return found
        return []

    def _could_be(self, ours: str, its: str) -> bool:
        if its in self.found.values():
            return False
        ids = self.found.get("response_ids", "")
        rows = [row for row in self.rows if row.get(its) is not None]
        if ours == "response_ids":
            rows = [row for row in responses(rows, its) if row.get(its) is not None]
        if ours == "prompt_ids" and any(_ends_with(row[its], row.get(ids)) for row in rows):
            return False  # prompt and response in one
        return _are_evidence(ours, [row[its] for row in rows]) and all(
            fits(ours, row[its], row.get(ids)) for row in rows
        )

    def as_long_as(self, ours: str) -> list[str]:
        """The only other column of token ids that has, in every row, one for each value of ours."""
        values = [row.get(self.found.get(ours, "")) for row in self.rows]
        left = (its for its in self.names if its not in self.found.values())
        ids = {its: [row.get(its) for row in self.rows] for its in left}
        found = [
            its
            for its, lists in ids.items()
            if all(map(_one_for_each, lists, values))
            and not all(fits("loss_mask", value) for value in lists)
        ]
        return found if len(found) == 1 else []

    def take_log_probabilities(self) -> None:
        """A name that hints at an engine, or at nothing, is μ; the others are the trainer's,
        current or recomputed.
        """
        roles: dict[str, list[str]] = {
            role: [] for role in ("rollout", "old", "recomputed", "trainer", "plain")
        }
        for its in self.names:
            if (role := _role(self.names[its])) and self._could_be("logp_rollout", its):
                roles[role].append(its)
        rollout, plain, old, recomputed = (
            roles[role] for role in ("rollout", "plain", "old", "recomputed")
        )
        trainer = roles["trainer"]
        if "logp_rollout" in self.found or rollout:
            trainer = trainer + plain
        elif plain and not old:
            rollout = plain
        elif old and recomputed:
            rollout, old = old, []  # with a proximal policy, "old" is the one that sampled
        elif plain:
            rollout = trainer = plain + old  # current and old, or the engine's and the trainer's
            old = []
        self.take("logp_rollout", rollout)
        anchors = old + recomputed
        self.take("logp_trainer", trainer or anchors)
        if trainer:
            self.take("logp_recomputed", anchors)


def whose(name: str) -> str | None:
    """Whose log-probabilities a column of this name holds ("plain": it does not say); None for
    any other column.
    """
    return _role(_words(name))


def _role(words: frozenset[str]) -> str | None:
    rest = words - {"logp"}
    if "logp" not in words or rest - {*RESPONSE, *_ROLLOUT, *_OLD, *_RECOMPUTED, *_TRAINER}:
        return None
    roles = {
        "old": _OLD,
        "recomputed": _RECOMPUTED,
        "rollout": _ROLLOUT - {*RESPONSE},
        "trainer": _TRAINER,
    }
    found = next((role for role, its in roles.items() if rest & its), "plain")
    return "rollout" if found == "plain" and rest & _ROLLOUT else found


def _one_for_each(ids: object, values: object) -> bool:
    lists = isinstance(ids, list) and isinstance(values, list)
    return lists and len(ids) == len(values) and fits("response_ids", ids)  # type: ignore[arg-type]


def _with_ids(own: str, *others: str) -> list[str]:
    """Names that mention tokens come first, and among these the one with our own word."""
    return [f"{own} id", "|".join(f"{word} id" for word in others), own, "|".join(others)]


def _words(name: str) -> frozenset[str]:
    """The words of a name in a common spelling: `perTokenLogProbs` is {logp}, `output_tokens`
    {output, id}.
    """
    parts = [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    singular = [
        part[:-1] if part.endswith("s") and not part.endswith(("ss", "us")) else part
        for part in parts
    ]
    spelled = _LOG_PROBABILITY.sub("logp", " ".join(singular)).split()
    words = {_SPELLINGS.get(word, word) for word in spelled} - _FILLERS
    return frozenset(words - {"id"} if "logp" in words else words)


def _words_of_path(name: str) -> frozenset[str]:
    """The words of the last name in a path, with those of the one before it if it does not say
    whose ids or log-probabilities these are.
    """
    names = [part for part in name.split(".") if part != EACH and not part.isdigit()]
    words = [_words(part) for part in names[-2:]]
    if len(words) == 1 or words[-1] - _GENERIC:
        return words[-1] if words else frozenset()
    return words[-1] | (words[0] - _CONTAINERS)


def _can_be_typed(name: str) -> bool:
    return (
        bool(name) and not set(name) & {",", "="} and visible(name) == name.strip() and name != OPEN
    )


def _are_evidence(ours: str, values: Sequence[object]) -> bool:
    """Whether values can tell which column this is: empty lists and nulls fit every one, and
    token ids would fit as log-probabilities.
    """
    if ours in _LOGP and any(map(_are_ids, values)):
        return False
    return any(not isinstance(value, list) or _has_value(value) for value in values)


def _has_value(values: Sequence[object]) -> bool:
    return any(entry is not None for entry in values)


def _are_ids(values: object) -> bool:
    """Whether a list can be token ids, and is none of zeros."""
    return isinstance(values, list) and any(values) and fits("response_ids", values)


def _ends_with(ids: object, response: object) -> bool:
    lists = isinstance(ids, list) and isinstance(response, list)
    return lists and 0 < len(response) < len(ids) and ids[-len(response) :] == response  # type: ignore[arg-type, index]


def text_only(rows: Sequence[Row]) -> str | None:
    """Why a log of texts cannot be imported, and what to record instead; None for anything with
    token ids.
    """
    words = {name: _words(name) for row in rows for name in row}
    if any(_speaks_of_tokens(words[name], value) for row in rows for name, value in row.items()):
        return None
    said = {
        word
        for row in rows
        for name, value in row.items()
        if _is_text(value)
        for word in words[name]
    }
    if not (said & {*PROMPT} and said & {*RESPONSE}):
        return None
    title, instead = next(
        ((title, instead) for title, keys, instead in _TEXT_LOGS if keys <= rows[0].keys()),
        _OTHER_TEXTS,
    )
    return (
        f"is {title}: text without token ids or log-probabilities. {RETOKENISED}, so nothing in "
        f"it can be compared. Record the run instead: {instead}; see mismatch-cli guide record."
    )


def _speaks_of_tokens(words: frozenset[str], value: object) -> bool:
    while isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    return "logp" in words or bool(
        words & {*PROMPT, *RESPONSE, "id"} and value and fits("response_ids", value)
    )


def _is_text(value: object) -> bool:
    """Whether a value is a text, chat messages, or a list of these."""
    if isinstance(value, list):
        return 0 < _lists.depth_of(value) < _CHATS and bool(value) and all(map(_is_text, value))
    return isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)
