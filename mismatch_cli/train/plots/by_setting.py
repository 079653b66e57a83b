"""Training curves by setting, such as model or problems (DPPO paper, figures 8 to 10)."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from mismatch_cli.report.drawing.panels import Sheet
from mismatch_cli.train.plots._charts import AS_ABOVE, OF_PAPER, Chart, draw_grid, has_curves
from mismatch_cli.train.plots._training_charts import accuracy, entropy, gap, length, reward
from mismatch_cli.train.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Reward and mismatch"
PLACE = 2
TITLE = "Training curves by setting"
DATA = "runs in several settings: other models, problems or rates"
CAPTION = (
    "Runs that differ in more than algorithm and seed, with a panel per setting, named above it: "
    "mean reward of the batch with evaluations (◆), or a panel per evaluation set; mean |π − μ| "
    "at the weights that sampled; for few settings also length and entropy of the responses. "
    "Panels of one quantity share their axis unless one would be flat on it. At most six settings "
    f"are drawn. {AS_ABOVE} "
    f"{OF_PAPER} DPPO paper, figures 8 to 10, and figure 20."
)

_FEW = 3  # settings up to which length and entropy are drawn
_MOST = 6  # settings drawn; the tables have all


def needs(data: TrainingAnalysis) -> bool:
    return len(data.settings) > 1 and has_curves(chain(*_rows(data)))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    settings = min(len(data.settings), _MOST)
    names = dict.fromkeys(run.algorithm for run in data.runs)
    # Four settings in three columns would leave the second line of each quantity almost empty.
    columns = settings if settings <= _FEW + 1 else _FEW
    draw_grid(figure, _rows(data), names, columns)


def _rows(data: TrainingAnalysis) -> list[list[Chart]]:
    """A row per quantity, with a chart per setting."""
    settings = list(data.settings.items())[:_MOST]
    rows = []
    for chart_of in _quantities(data):
        rows.append([chart_of(runs)._replace(setting=setting) for setting, runs in settings])
    return rows


def _quantities(data: TrainingAnalysis) -> Iterator[Callable[[TrainingAnalysis], Chart]]:
    """What is drawn, each quantity as the function that makes its chart from the runs of one
    setting.
    """
    eval_sets = data.eval_sets if len(data.eval_sets) > 1 else []
    yield partial(reward, evaluations=not eval_sets)
    for name in eval_sets:
        yield partial(accuracy, name=name)
    yield gap
    if len(data.settings) <= _FEW:
        yield from (length, entropy)
