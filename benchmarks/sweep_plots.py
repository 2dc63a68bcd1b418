"""docs/sweep.md's pictures, from the rows of vllm_sweep.py."""

from pathlib import Path
from typing import Any

from sweep_report import SNAPSHOTS, Figures, read

# The paper's one pair of absolute times for this model: p99 TTFT in ms, of a load not named, on one B200.
PAPER_TTFT = {SNAPSHOTS: 27_489.0, "reconstruct": 683.0}
PAPER_SHARE, PAPER_REQUESTS = 0.6, 128


def draw(pyplot: Any, results: Path, docs: Path) -> list[Path]:
    """Draw tokens a second and p99 TTFT over the load, a picture per setting and kind of arrivals; return the files."""
    pyplot.rcParams.update({"svg.hashsalt": "treewy", "svg.fonttype": "none"})
    drawn = []
    for setting, figures in read(results)[0].items():
        for arrivals in sorted({where.arrivals for where in figures}):
            file = docs / f"{setting.slug}-{arrivals}.svg"
            _picture(pyplot, {where: x for where, x in figures.items() if where.arrivals == arrivals}, file)
            drawn.append(file)
    return drawn


def _picture(pyplot: Any, figures: Figures, file: Path) -> None:
    shares = sorted({where.utilisation for where in figures})
    levels = sorted({where.level for where in figures})
    closed = next(iter(figures)).arrivals == "closed"
    size = (4.5 * len(shares), 7)
    picture, axes = pyplot.subplots(2, len(shares), figsize=size, squeeze=False, sharex=True, layout="constrained")
    for column, share in enumerate(shares):
        speed, first = axes[0][column], axes[1][column]
        for number, commit in enumerate(sorted({x for engines in figures.values() for x in engines})):
            at = [(where, engines[commit]) for where, engines in figures.items() if commit in engines]
            at = [(where.level, figure) for where, figure in at if where.utilisation == share]
            style = {"color": f"C{number}", "label": commit}
            speed.plot([level for level, _ in at], [figure.tokens_per_s for _, figure in at], "o-", **style)
            first.plot([level for level, _ in at], [figure.ttft[1] for _, figure in at], "o-", **style)
            least = [(level, figure.ttft[1]) for level, figure in at if figure.ttft_at_least]
            first.plot(*zip(*least, strict=True) if least else ([], []), "^", **style | {"label": None}, markersize=12)
            if closed and share == PAPER_SHARE and commit in PAPER_TTFT:
                style["label"] = f"{commit}, the paper's"
                first.plot([PAPER_REQUESTS], [PAPER_TTFT[commit]], "*", markersize=12, **style)
        speed.set(title=f"{share:g} of the memory", ylabel="tokens/s", xscale="log", ylim=(0, None))
        first.set(ylabel="p99 TTFT, ms; triangles: at least", xscale="log", yscale="log")
        first.set(xlabel="requests at once" if closed else "requests a second")
        first.set_xticks(levels, [f"{level:g}" for level in levels])
        first.minorticks_off()
        first.legend()
    picture.savefig(file, metadata={"Date": None})
    pyplot.close(picture)
