"""Starts either side under a change, and reads the missing legs with it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mismatch_cli.bisect.altered_model import folder_with, folder_with_config
from mismatch_cli.bisect.experiments import Change, Leg
from mismatch_cli.bisect.legs import Legs, engine_reads, trainer_reads
from mismatch_cli.bisect.side_settings import RolloutSide, TrainerSide, engine_part
from mismatch_cli.bisect.toggles import SWITCHES
from mismatch_cli.models.engines import Engine, create_engine
from mismatch_cli.models.loading import round_weights
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.models.torch_settings import DTYPES
from mismatch_cli.probe.score import load_trainer
from mismatch_cli.trace.recording_folder import final_folder

WEIGHTS = "weights"
Enough = Callable[[Leg], bool]


def never(_leg: Leg) -> bool:
    """Never stop early."""
    return False


def leg_of(side: str, change: Change, what: str) -> Leg:
    """The leg of a change, named after it, so that the same change always has the same leg."""
    text = json.dumps(change, sort_keys=True, default=str)
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower().replace("engine_args", "")).strip("-")
    # The slug is for readers and is cut off, so a digest of the whole change tells legs apart.
    digest = hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
    return Leg(f"{side}-{slug[:60].rstrip('-')}-{digest}", side, what, change)


@dataclass(frozen=True)
class Runner:
    """Both sides of a trace, and the legs that they read."""

    legs: Legs
    rollout: RolloutSide
    trainer: TrainerSide

    def read_rollout(
        self,
        legs: Sequence[Leg],
        enough: Enough = never,
        also: Callable[[Engine], None] | None = None,
    ) -> None:
        """Read the missing legs, all with one engine: their changes differ only in how it reads.

        Calls `also` with the engine while it is loaded.
        """
        missing = [leg for leg in legs if not self.legs.is_done(leg.name)]
        if not missing and also is None:
            return
        with self.engine(engine_part(legs[0].change)) as engine:
            for leg in missing:
                read = engine_reads(engine, leg.change)
                self.legs.read(leg, read, engine.describe(), partial(enough, leg))
            if also is not None:
                also(engine)

    def read_trainer(self, legs: Sequence[Leg], enough: Enough = never) -> None:
        """Read the missing legs with one trainer: their changes differ only in the shape of
        micro-batches.
        """
        missing = [leg for leg in legs if not self.legs.is_done(leg.name)]
        if not missing:
            return
        token_budget = self.trainer.config.scorer.token_budget
        with self.loaded_trainer(missing[0].change) as trainer:
            for leg in missing:
                other_shape = bool(leg.change.get("other_shape"))
                read = trainer_reads(trainer, token_budget, other_shape)
                self.legs.read(leg, read, trainer.describe(), partial(enough, leg))

    @contextmanager
    def engine(self, change: Change, **more: Any) -> Iterator[Engine]:
        """The rollout engine under a change of its settings and of the environment."""
        progress, world = self.legs.progress, self.legs.ranks.world
        name = self.rollout.engine
        progress.say(
            f"Loading {self.rollout.model} into the rollout engine ({name}){_with_change(change)}"
        )
        log = final_folder(self.legs.run_folder) / "log" / f"{name}{world.suffix}.log"
        settings = self.rollout.settings(
            change, log_file=log, say=progress.say, world=world, **more
        )
        with (
            changed_environment(change.get("environment", {})),
            closing(create_engine(name, settings)) as engine,
        ):
            yield engine

    @contextmanager
    def loaded_trainer(self, change: Change) -> Iterator[Trainer]:
        """The trainer under a change of its settings, its tensors or its configuration."""
        side, legs = self.trainer.changed(change), self.legs
        with TemporaryDirectory(prefix="mismatch-cli-") as scratch:
            model = self.model_folder(side.config.scoring_model, change, Path(scratch))
            adapter = side.config.scorer.adapter
            if "trainer_adapter" in change:
                # A change read from a run folder may name anything: the rollout's own is meant.
                adapter = self.rollout.adapter
            trainer = load_trainer(
                model, adapter, side.config.scorer, side.sampling, legs.progress, legs.ranks
            )
            if change.get("rounded_to") in DTYPES[1:]:
                round_weights(trainer.model, change["rounded_to"])
            yield trainer

    def model_folder(self, model: str, change: Change, scratch: Path) -> str:
        """The trainer's model, with the change's tensors or configuration values from the
        engine.
        """
        groups = change.get("tensors") or {}
        tensors = list(chain.from_iterable(groups.values()))
        if tensors:
            model = str(folder_with(model, self.weights_folder, tensors, scratch / "tensors"))
        config = dict(change.get("model_config", {}))
        # It names code to run, which a change read from a run folder must not.
        config.pop("auto_map", None)
        if config:
            model = str(folder_with_config(model, config, scratch / "config"))
        return model

    @property
    def weights_folder(self) -> Path:
        """The folder with the engine's differing tensors."""
        return self.legs.run_folder / WEIGHTS


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment with these variables, as far as they are among `SWITCHES`."""
    # A resumed search reads its changes from its folder, which may be somebody else's.
    allowed = {name: value for name, value in variables.items() if name in SWITCHES}
    before = {name: os.environ.get(name) for name in allowed}
    os.environ.update(allowed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _with_change(change: Change) -> str:
    """A change in a line of the log, such as ` with kv_cache_dtype float8`."""
    settings = [f"{name} {value}" for name, value in _leaves(change)]
    if not settings:
        return ""
    return f" with {', '.join(settings)}"


def _leaves(change: Change) -> Iterator[tuple[str, Any]]:
    for name, value in change.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield name, "as the model says" if value is None else value
