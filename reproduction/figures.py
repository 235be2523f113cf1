"""The figures, made from the runs; and measurements for the theorems."""

from pathlib import Path
from statistics import fmean

from fedlesam.data.splits import make_split
from fedlesam.runs.build import load_data
from fedlesam.runs.methods import method_name
from reproduction import plots, probing
from reproduction.context import Context, average
from reproduction.items import SETTINGS, Item, RunSpec
from reproduction.result_table import Block, Cell, ResultTable
from reproduction.scales import settle

LOOKS = (
    ("perturbation drift", "drift", "drift"),
    ("global sharpness", "sharpness", "ascent"),
    ("scale-invariant sharpness", "sharpness", "relative_ascent"),
    ("cosine of the estimate and the gradient", "estimate", "cosine"),
)
"""What figure 2 shows: a title, the probe and its value."""


def surface(item: Item, context: Context) -> ResultTable:
    """Figures 1, 3 and 6: of the first seed."""
    results = context.results
    runs = {spec.label: results.of(spec)[0].path for spec in item.specs if results.of(spec)}
    notes = [f"missing: {spec.label}: {results.why_missing(spec)}" for spec in item.specs if spec.label not in runs]
    folder = context.folder / item.name
    drawn: list[Path] = []
    if runs:
        wrong = probing.surfaces(list(runs.values()), context.results.scale.surface, folder, context.data_dir)
        if wrong:
            notes.append(f"missing: {wrong}")
        else:
            for picture in sorted(folder.glob("*.png")):
                drawn.append(picture.rename(context.folder / f"{item.name}-{picture.name}"))
            notes.append(f"{context.results.scale.surface}; the same random directions for all, filter-normalised")
    return ResultTable(item.name, item.shows, notes=tuple(notes), pictures=tuple(drawn))


def drift(item: Item, context: Context) -> ResultTable:
    """Figure 2: what the runs measured while they trained, of the first seed; in two panels more than the paper's."""
    panels: dict[str, dict[str, plots.Curve]] = {}
    rows: dict[str, tuple[Cell, ...]] = {}
    notes = ["means are over the readings after the first round's; the last is that of the last model"]
    for spec in item.specs:
        runs = context.results.of(spec)
        name = method_name(spec.method, spec.split)
        if not runs:
            notes.append(f"missing: {spec.label}: {context.results.why_missing(spec)}")
            continue
        cells: list[Cell] = []
        for title, probe, value in LOOKS:
            points = probing.readings(runs[0].path, probe, value) if probe in spec.probes else []
            late = [y for at, y in points if at > 0]
            cells.append(Cell(fmean(late)) if late else Cell())
            if probe == "sharpness":
                cells.append(Cell(points[-1][1]) if points else Cell())
            if points:
                rounds = runs[0].config.rounds
                panels.setdefault(title, {})[name] = [(at / rounds, y) for at, y in points]
            elif probe in spec.probes and probe != "estimate":
                notes.append(f"missing: {title} of {name}: was not measured")
        rows[name] = tuple(cells)
    drawn = (plots.over_rounds(panels, context.folder / f"{item.name}.png"),) if panels else ()
    columns = tuple(
        f"{title}, {which}"
        for title, probe, _ in LOOKS
        for which in (("mean", "last") if probe == "sharpness" else ("mean",))
    )
    blocks = (Block("", columns, rows, 3),) if rows else ()
    return ResultTable(item.name, item.shows, blocks, notes=tuple(notes), pictures=drawn)


def ablation(item: Item, context: Context) -> ResultTable:
    """Figure 4: the mean over a data set's splits; the paper has no numbers for it."""
    ratios = tuple(dict.fromkeys(spec.ratio for spec in item.specs if spec.ratio is not None))
    panels: dict[str, tuple[plots.Curve, float | None]] = {}
    rows = {}
    for data in dict.fromkeys(spec.data for spec in item.specs):

        def mean(ratio: float | None, data: str = data) -> Cell:
            specs = [spec for spec in item.specs if (spec.data, spec.ratio) == (data, ratio)]
            return average([context.cell(spec) for spec in specs])

        rows[data] = (mean(None), *(mean(ratio) for ratio in ratios))
        base, *found = (cell.ours for cell in rows[data])
        curve = [(ratio, value) for ratio, value in zip(ratios, found, strict=True) if isinstance(value, float)]
        if curve:
            panels[data] = (curve, base if isinstance(base, float) else None)
    columns = ("fedavg", *(f"rho/lr {ratio:g}" for ratio in ratios))
    drawn = (plots.ablation(panels, context.folder / f"{item.name}.png"),) if panels else ()
    notes = ("rho/lr: the paper's values are not printed; decades around the recommended ones are taken",)
    blocks = (Block("accuracy of fedlesam-s, mean over the splits, last round", columns, rows),) if rows else ()
    return ResultTable(item.name, item.shows, blocks, notes, drawn)


def heat(item: Item, context: Context) -> ResultTable:
    """Figure 5: the splits themselves, of seed 0; nothing is trained."""
    panels, notes = {}, []
    for data in ("cifar10", "cifar100"):
        for clients, active in SETTINGS.values():
            for split in ("dirichlet-0.6", "dirichlet-0.1"):
                spec = RunSpec("fedavg", data, split, clients, active)
                config = settle(spec, context.results.scale, 0, context.data_dir, 1)
                if not context.only.keeps(spec) or isinstance(config, str):
                    continue
                try:
                    found = load_data(config)
                except ValueError as error:
                    notes.append(f"missing: {spec.column}, {clients} clients: {error}")
                    continue
                dealt = make_split(config.split, found, config.clients, config.seed)
                labels = found.train.y.numpy()
                title = f"{config.data}, {config.clients} clients, {split.replace('dirichlet-', 'beta ')}"
                title += f" (for {data})" if config.data != data else ""
                panels[title] = dealt.class_counts(labels, len(found.classes))
    drawn = (plots.heat_maps(panels, context.folder / f"{item.name}.png"),) if panels else ()
    return ResultTable(item.name, item.shows, notes=tuple(notes), pictures=drawn)


def theory(item: Item, context: Context) -> ResultTable:
    """Theorem 2: its bound and what was measured. Theorem 1: Delta, the only term that differs for FedLESAM."""
    from reproduction.theory import theorem_1, theorem_2

    notes = (
        "Theorem 1's bound is not checked: its proof and its statement disagree; Delta is 0 for any perturbation that "
        "is constant in a round, a random one included (docs/errata.md, 13)",
    )
    columns = ("bias, median", "bias, largest", "mean square", "bound", "norm within", "square within")
    biases = {
        f"L lr = {found.step:g}": (
            *(Cell(value) for value in (found.bias_median, found.bias_max, found.mean_square, found.bound)),
            Cell(f"{found.norms_within} of {found.measured}"),
            Cell(f"{found.squares_within} of {found.measured}"),
        )
        for found in theorem_2(starts=context.results.scale.theory_starts)
    }
    heads = ("change, mean", "change, largest", "FedSAM's bound, Lemma 2", "cosine with the global gradient")
    changes = {
        found.perturbation: tuple(Cell(value) for value in (found.mean, found.largest, found.bound, found.cosine))
        for found in theorem_1()
    }
    blocks = (
        Block("Theorem 2, the bias of the estimate", columns, biases, None),
        Block("Theorem 1's Delta, the change of the perturbation in a round", heads, changes, None),
    )
    return ResultTable(item.name, item.shows, blocks, notes)
