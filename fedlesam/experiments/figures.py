"""How each kind of figure is made from the runs; and what is measured beside the theorems."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from fedlesam.build import load_data
from fedlesam.data.split_names import make_split
from fedlesam.experiments import instruments, pictures
from fedlesam.experiments.bench import Bench, average, cell_of
from fedlesam.experiments.items import SETTINGS, Ask, Item
from fedlesam.experiments.scales import settle
from fedlesam.experiments.sheet import Block, Cell, Sheet
from fedlesam.report.methods import method_name

LOOKS = (
    ("perturbation drift", "drift", "drift"),
    ("global sharpness", "sharpness", "ascent"),
    ("scale-invariant sharpness", "sharpness", "relative_ascent"),
    ("cosine of the estimate and the gradient", "estimate", "cosine"),
)
"""What figure 2 shows: a title, the probe and its value."""


def surface(item: Item, bench: Bench) -> Sheet:
    """Figures 1, 3 and 6: of the first seed."""
    runs = {ask.label: bench.results.of(ask)[0].path for ask in item.asks if bench.results.of(ask)}
    notes = [f"hole: {ask.label}: {bench.results.hole(ask)}" for ask in item.asks if not bench.results.of(ask)]
    folder = bench.folder / item.name
    drawn: list[Path] = []
    if runs:
        found = instruments.surfaces(list(runs.values()), bench.results.scale.surface, folder, bench.data_dir)
        if isinstance(found, str):
            notes.append(f"hole: {found}")
        else:
            for picture in sorted(folder.glob("*.png")):
                drawn.append(picture.rename(bench.folder / f"{item.name}-{picture.name}"))
            notes.append(f"{bench.results.scale.surface}; the same random directions for all, filter-normalised")
    return Sheet(item.name, item.shows, notes=tuple(notes), pictures=tuple(drawn))


def drift(item: Item, bench: Bench) -> Sheet:
    """Figure 2: what the runs measured while they trained, of the first seed; in two panels more than the paper's."""
    panels: dict[str, dict[str, pictures.Curve]] = {}
    rows: dict[str, tuple[Cell, ...]] = {}
    notes = ["means are over the readings after the first round's; the last is that of the last model"]
    for ask in item.asks:
        runs = bench.results.of(ask)
        name = method_name(ask.method, ask.split)
        if not runs:
            notes.append(f"hole: {ask.label}: {bench.results.hole(ask)}")
            continue
        cells: list[Cell] = []
        for title, probe, value in LOOKS:
            points = instruments.readings(runs[0].path, probe, value) if probe in ask.probes else []
            late = [y for at, y in points if at > 0]
            cells.append(Cell(fmean(late)) if late else Cell())
            if probe == "sharpness":
                cells.append(Cell(points[-1][1]) if points else Cell())
            if points:
                rounds = runs[0].config.rounds
                panels.setdefault(title, {})[name] = [(at / rounds, y) for at, y in points]
            elif probe in ask.probes and probe != "estimate":
                notes.append(f"hole: {title} of {name}: was not measured")
        rows[name] = tuple(cells)
    drawn = (pictures.over_rounds(panels, bench.folder / f"{item.name}.png"),) if panels else ()
    columns = tuple(
        f"{title}, {which}"
        for title, probe, _ in LOOKS
        for which in (("mean", "last") if probe == "sharpness" else ("mean",))
    )
    blocks = (Block("", columns, rows, 3),) if rows else ()
    return Sheet(item.name, item.shows, blocks, notes=tuple(notes), pictures=drawn)


def ablation(item: Item, bench: Bench) -> Sheet:
    """Figure 4: the mean over a data set's splits; the paper has no numbers for it."""
    ratios = tuple(dict.fromkeys(ask.ratio for ask in item.asks if ask.ratio is not None))
    panels: dict[str, tuple[pictures.Curve, float | None]] = {}
    rows = {}
    for data in dict.fromkeys(ask.data for ask in item.asks):

        def mean(ratio: float | None, data: str = data) -> Cell:
            asks = [ask for ask in item.asks if (ask.data, ask.ratio) == (data, ratio)]
            return average([cell_of(bench.results.accuracy(ask), None, None, bench.results.hole(ask)) for ask in asks])

        rows[data] = (mean(None), *(mean(ratio) for ratio in ratios))
        base, *found = (cell.ours for cell in rows[data])
        curve = [(ratio, value) for ratio, value in zip(ratios, found, strict=True) if isinstance(value, float)]
        if curve:
            panels[data] = (curve, base if isinstance(base, float) else None)
    columns = ("fedavg", *(f"rho/lr {ratio:g}" for ratio in ratios))
    drawn = (pictures.ablation(panels, bench.folder / f"{item.name}.png"),) if panels else ()
    notes = ("rho/lr: the paper's values are not printed; decades around the recommended ones are taken",)
    blocks = (Block("accuracy of fedlesam-s, mean over the splits, last round", columns, rows),) if rows else ()
    return Sheet(item.name, item.shows, blocks, notes, drawn)


def heat(item: Item, bench: Bench) -> Sheet:
    """Figure 5: the splits themselves, of seed 0; nothing is trained."""
    panels, notes = {}, []
    for data in ("cifar10", "cifar100"):
        for clients, active in SETTINGS.values():
            for split in ("dirichlet-0.6", "dirichlet-0.1"):
                ask = Ask("fedavg", data, split, clients, active)
                config = settle(ask, bench.results.scale, 0, bench.data_dir, 1)
                if not bench.only.keeps(ask) or isinstance(config, str):
                    continue
                try:
                    found = load_data(config)
                except ValueError as error:
                    notes.append(f"hole: {ask.column}, {clients} clients: {error}")
                    continue
                dealt = make_split(config.split, found, config.clients, config.seed)
                labels = found.train.y.numpy()
                title = f"{config.data}, {config.clients} clients, {split.replace('dirichlet-', 'beta ')}"
                title += f" (for {data})" if config.data != data else ""
                panels[title] = dealt.class_counts(labels, len(found.classes))
    drawn = (pictures.heat_maps(panels, bench.folder / f"{item.name}.png"),) if panels else ()
    return Sheet(item.name, item.shows, notes=tuple(notes), pictures=drawn)


def theory(item: Item, bench: Bench) -> Sheet:
    """Theorem 2: its bound beside what was measured. Theorem 1: Delta, all that it says of FedLESAM."""
    notes = (
        "Theorem 1's bound is not checked: its proof and its statement disagree; Delta is 0 for any perturbation that "
        "is constant in a round, a random one included (docs/errata.md, 13)",
    )
    found = instruments.theory(bench.results.scale.theory)
    if isinstance(found, str):
        return Sheet(item.name, item.shows, notes=(f"hole: {found}", *notes))
    changes = {
        delta["perturbation"]: tuple(Cell(float(delta[key])) for key in ("mean", "largest", "bound", "cosine"))
        for delta in found["delta"]
    }
    heads = ("change, mean", "change, largest", "FedSAM's bound, Lemma 2", "cosine with the global gradient")
    columns = ("bias, median", "bias, largest", "mean square", "bound", "norm within", "square within")
    rows: Mapping[str, tuple[Cell, ...]] = {
        f"L lr = {step['step']:g}": (
            *(Cell(float(step[key])) for key in ("bias_median", "bias_max", "mean_square", "bound")),
            Cell(f"{step['norms_within']} of {step['measured']}"),
            Cell(f"{step['squares_within']} of {step['measured']}"),
        )
        for step in found["steps"]
    }
    blocks = (
        Block("Theorem 2, the bias of the estimate", columns, rows, None),
        Block("Theorem 1's Delta, the change of the perturbation in a round", heads, changes, None),
    )
    return Sheet(item.name, item.shows, blocks, notes)
