"""What a study varies: a small algebra over dotted fields of an experiment.

An experiment file says beside `get_config()`:

    def sweep():
        return Sweep(
            product(vary("model.norm_placement", "pre", "post"), vary("model.position", "rotary", "alibi")),
            question="Is post-norm as good as pre-norm at this depth, whatever tells positions?",
            seeds=3,
        )

An arm is one setting of the fields that vary; it has a name (`post-alibi`) and is trained once for each seed. All arms see the same seeds,
and so the same text in the same order.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping

from transformer.errors import UserError, nearest
from transformer.units import higher_is_better

Changes = Mapping[str, object]
"""Dotted field of an experiment -> its value."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting: what it changes, and by field what its value was called, where it has a name."""

    name: str
    changes: Changes
    called: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def call(self, field: str) -> str:
        """Its value of a field, as a person would say it."""
        value = self.changes.get(field)
        return self.called.get(field) or (f"{value:g}" if isinstance(value, float) else str(value))


@dataclasses.dataclass(frozen=True)
class Grid:
    """Points, in order."""

    points: tuple[Point, ...]

    def __len__(self) -> int:
        return len(self.points)


def vary(field: str, *values, **named) -> Grid:
    """One field, a point for each value; `named` gives the points other names: vary("model.d_ff", narrow=256, wide=1024)."""
    if not values and not named:
        raise UserError(f"sweep: vary({field!r}) has no values")
    points = [Point(_spell(field, value), {field: value}) for value in values]
    return Grid(
        (*points, *(Point(name, {field: value}, {field: name}) for name, value in named.items()))
    )


def scan(field: str, low: float, high: float, points: int) -> Grid:
    """One number at values spaced geometrically from `low` to `high`, rounded to two significant digits (between two ints to whole numbers; equal
    ones are one): scan("optimizer.learning_rate", 1e-4, 1e-1, 7)."""
    if not 0 < low < high or points < 2:
        raise UserError(
            f"sweep: scan({field!r}, {low}, {high}, {points}): from a number over 0 to a larger one, by 2 points or more"
        )
    values = [low * (high / low) ** (n / (points - 1)) for n in range(points)]
    whole = isinstance(low, int) and isinstance(high, int)
    return vary(
        field, *dict.fromkeys(int(x) if whole else x for x in (float(f"{x:.1e}") for x in values))
    )


def arms(**named: Changes) -> Grid:
    """Points by name, each with its own changes: arms(plain={}, deep={"model.num_decoder_layers": 24})."""
    for name, changes in named.items():
        if not isinstance(changes, Mapping):
            raise UserError(
                f"sweep: arms({name}={changes!r}): expected a table of fields, {{'model.d_ff': 512}}"
            )
    return Grid(tuple(Point(name, dict(changes)) for name, changes in named.items()))


def product(*grids: Grid) -> Grid:
    """Every point of each with every point of the others."""
    return Grid(
        tuple(_joined(points) for points in itertools.product(*(grid.points for grid in grids)))
    )


def zipped(*grids: Grid) -> Grid:
    """The first points together, then the second, and so on."""
    if len({len(grid) for grid in grids}) > 1:
        raise UserError(
            f"sweep: zipped() of {' and '.join(str(len(grid)) for grid in grids)} points; they must be as many"
        )
    return Grid(
        tuple(_joined(points) for points in zip(*(grid.points for grid in grids), strict=True))
    )


def chain(*grids: Grid) -> Grid:
    """The points of one after those of another."""
    return Grid(tuple(itertools.chain.from_iterable(grid.points for grid in grids)))


RESERVED = ("claims", "logs", "report")
"""Folders of a sweep that hold no arm."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A study: arms, seeds, and how they are to be compared.

    `metric` is what decides: a name in metrics.jsonl, `test/loss` or `test/bleu`, say. `declared` says why arms may differ in what no field
    of theirs says: parameters, flops, attention, data, tokenizer, warmup (lab/guard.py); {"parameters": "T5's bias has 128 numbers"}. `match` sizes arms equal to the baseline in
    "parameters" or "flops" by their d_ff, or in "time" by their steps.

    Two arms of which the same programs are built are refused, unless one of them is a control: `controls` maps the arm to the reason,
    {"again": "the same model spelled in another way must give the same numbers"}.
    """

    grid: Grid
    question: str = ""
    baseline: str = ""  # an arm; "": the first
    seeds: int | tuple[int, ...] = 3
    metric: str = "test/loss"
    higher_is_better: bool | None = None  # None: as the metric's name says
    declared: Mapping[str, str] = dataclasses.field(default_factory=dict)
    match: str = ""
    controls: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.grid, Grid):
            raise UserError(
                f"sweep: {self.grid!r}; a Grid is expected: vary(FIELD, VALUE, ...), arms(NAME={{...}}), or several of them in product(), zipped() or chain()"
            )
        names = [point.name for point in self.grid.points]
        if not names:
            raise UserError("sweep: no arms")
        for name in names:
            if names.count(name) > 1:
                raise UserError(
                    f"sweep: two arms are called {name!r}; name them with vary(field, NAME=value) or arms(NAME={{...}})"
                )
            if name in RESERVED:
                raise UserError(
                    f"sweep: an arm is called {name!r}, as a folder beside the arms is; name it with vary(field, NAME=value) or arms(NAME={{...}})"
                )
            if not re.fullmatch(r"[A-Za-z0-9][\w.=+-]*", name):
                raise UserError(
                    f"sweep: {name!r} is no name for a folder; name it with vary(field, NAME=value) or arms(NAME={{...}})"
                )
        if self.baseline and self.baseline not in names:
            raise UserError(
                f"sweep: baseline {self.baseline!r} is no arm; {nearest(self.baseline, names)}"
            )
        seeds = tuple(range(self.seeds)) if isinstance(self.seeds, int) else tuple(self.seeds)
        if (
            not seeds
            or len(set(seeds)) < len(seeds)
            or not all(type(seed) is int and seed >= 0 for seed in seeds)
        ):
            raise UserError(
                f"sweep: seeds: {self.seeds!r}; a number of seeds, 1 or more, or a list of different ones"
            )
        if any("seed" in point.changes for point in self.grid.points):
            raise UserError(
                "sweep: 'seed' varies in the grid; say Sweep(..., seeds=N), so that all arms have the same"
            )
        if self.match not in ("", "parameters", "flops", "time"):
            raise UserError(
                f"sweep: match: {self.match!r}; {nearest(self.match, ('parameters', 'flops', 'time'))}"
            )
        if not isinstance(self.controls, Mapping):
            raise UserError(
                f"sweep: controls: {self.controls!r}; a table, {{'ARM': 'why two arms are the same'}}"
            )
        for arm in self.controls:
            if arm not in names:
                raise UserError(f"sweep: controls: {arm!r} is no arm; {nearest(arm, names)}")
        if not isinstance(self.declared, Mapping):
            raise UserError(
                f"sweep: declared: {self.declared!r}; a table, {{'parameters': 'why they differ'}}"
            )
        object.__setattr__(
            self, "higher_is_better", higher_is_better(self.metric, self.higher_is_better)
        )
        object.__setattr__(self, "baseline", self.baseline or names[0])
        object.__setattr__(self, "seeds", seeds)

    @property
    def arms(self) -> dict[str, Changes]:
        """Name -> what it changes, the baseline first."""
        return {name: point.changes for name, point in self.points.items()}

    @property
    def points(self) -> dict[str, Point]:
        """The same with what values are called."""
        found = {point.name: point for point in self.grid.points}
        return {self.baseline: found.pop(self.baseline)} | found

    @property
    def fields(self) -> tuple[str, ...]:
        """All that varies."""
        return tuple(dict.fromkeys(field for changes in self.arms.values() for field in changes))


def _joined(points: Iterable[Point]) -> Point:
    names, changes, called = [], {}, {}
    for point in points:
        names.append(point.name)
        if both := changes.keys() & point.changes.keys():
            raise UserError(f"sweep: {both.pop()!r} is set twice in one arm ({'-'.join(names)})")
        changes |= point.changes
        called |= point.called
    return Point("-".join(names), changes, called)


def _spell(field: str, value) -> str:
    """A short name: the value, with its field where that alone says nothing."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Mapping):
        options = [f"{key}={x}" for key, x in value.items() if key != "name"]
        return "+".join([str(value.get("name", field.rpartition(".")[2])), *options])
    if isinstance(value, (list, tuple)):
        return f"{field.rpartition('.')[2]}=" + "+".join(map(str, value))
    return f"{field.rpartition('.')[2]}={value}"
