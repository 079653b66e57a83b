"""mismatch-cli's scorer as a racer: log π, entropy and rank of every token."""

from __future__ import annotations

from scored import Response, options, take_turns

# isort: split
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer


def main() -> None:
    asked = options()
    trainer = Trainer.load(asked.model, sampling=SamplingSettings(), dtype=asked.dtype)

    def score(responses: list[Response]) -> list[float]:
        requests = [ScoreRequest(r.prompt_ids, r.response_ids) for r in responses]
        scores = trainer.score(requests, token_budget=8192)
        return [logp for each in scores for logp in each.logp_T.tolist()]

    take_turns(score, asked.responses)


if __name__ == "__main__":
    main()
