"""Sweeps: a small algebra over dotted fields of an experiment.

An experiment file may define `sweep()` beside `get_config()`, as experiments/ablation.py does:

    return Sweep(product(vary("model.norm_placement", "pre", "post"), vary("model.d_ff", 64, 96)))

An arm is one setting of the varied fields. It has a name (`post-d_ff=96`) and is trained once per
seed. All arms use the same seeds, and therefore the same data in the same order."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping

from transformer.errors import UserError, nearest
from transformer.units import higher_is_better

Changes = Mapping[str, object]  # dotted field of an experiment -> its value
RESERVED = ("claims", "logs", "report", "tuning", "tuned")  # folders in a sweep's, without an arm


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting: its name, its changes, and `called`: names that `vary` was given for values."""

    name: str
    changes: Changes
    called: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def call(self, field: str) -> str:
        """Returns the display name of the value of a field."""
        value = self.changes.get(field)
        return self.called.get(field) or (f"{value:g}" if isinstance(value, float) else str(value))


class Grid(tuple[Point, ...]):
    """An ordered set of points."""


def vary(field: str, *values, **named) -> Grid:
    """Varies one field. Keywords name the points: vary("model.d_ff", narrow=256, wide=1024)."""
    if not values and not named:
        raise UserError(f"sweep: vary({field!r}) has no values")
    points = [Point(_point_name(field, value), {field: value}) for value in values]
    points += [Point(name, {field: value}, {field: name}) for name, value in named.items()]
    return Grid(points)


def scan(field: str, low: float, high: float, points: int) -> Grid:
    """Varies one number over up to `points` geometrically spaced values, rounded to two digits, and
    to integers if `low` and `high` are. Example: scan("optimizer.learning_rate", 1e-4, 1e-1, 7)."""
    if not 0 < low < high or points < 2:
        way_out = "use 0 < low < high and at least 2 points"
        raise UserError(f"sweep: scan({field!r}, {low}, {high}, {points}): {way_out}")
    values = [low * (high / low) ** (n / (points - 1)) for n in range(points)]
    whole = isinstance(low, int) and isinstance(high, int)
    rounded = [float(f"{x:.1e}") for x in values]
    return vary(field, *dict.fromkeys(map(int, rounded) if whole else rounded))


def arms(**named: Changes) -> Grid:
    """Returns named points: arms(plain={}, deep={"model.num_decoder_layers": 24})."""
    for name, changes in named.items():
        if not isinstance(changes, Mapping):
            raise UserError(f"sweep: arms({name}={changes!r}): expected a mapping of fields")
    return Grid(Point(name, dict(changes)) for name, changes in named.items())


def product(*grids: Grid) -> Grid:
    """Combines every point of each grid with every point of the others."""
    combined = itertools.product(*grids)
    return Grid(functools.reduce(_joined, points or (Point("", {}),)) for points in combined)


def zipped(*grids: Grid) -> Grid:
    """Combines the first points of all grids, then the second points, and so on."""
    if len({len(grid) for grid in grids}) > 1:
        problem = f"zipped() of {' and '.join(str(len(grid)) for grid in grids)} points"
        raise UserError(f"sweep: {problem}; use grids of equal length")
    return Grid(functools.reduce(_joined, points) for points in zip(*grids, strict=True))


def chain(*grids: Grid) -> Grid:
    """Concatenates the points of several grids."""
    return Grid(itertools.chain(*grids))


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Tunes one number for each arm, for `Sweep(tune=...)`.

    First, `points` values from `low` to `high` are tried, evenly spaced on a log scale (decays such
    as b2: on a log scale of 1 - b2). Then `more` values follow, one by one: beyond the grid if the
    best value is at its edge, otherwise halfway between the best value and its better neighbor. All
    arms try equally many values. They are rounded to two digits, and to integers if `low` is one.
    Example: tuned("optimizer.learning_rate", 1e-3, 3e-2)."""

    field: str
    low: float
    high: float
    points: int = 5
    more: int = 2

    def __post_init__(self):
        what = f"sweep: tuned({self.field!r}, {self.low!r}, {self.high!r})"
        if not 0 < self.low < self.high < (1 if self.is_decay else math.inf):
            raise UserError(f"{what}: use 0 < low < high{' < 1' * self.is_decay}")
        if self.points < 3 or self.more < 0:
            raise UserError(f"{what}: a parabola needs 3 points or more, and more=0 or more")

    @property
    def name(self) -> str:
        """The last part of the field."""
        return self.field.rpartition(".")[2]

    @property
    def is_decay(self) -> bool:
        """Whether the number is the decay of a mean: 1 - x is searched on a log scale, not x."""
        return self.name in ("b1", "b2", "momentum", "ema_decay")

    def x(self, value: float) -> float:
        """Returns the coordinate of a value, in powers of 2."""
        return -math.log2(1 - value) if self.is_decay else math.log2(value)

    def value(self, x: float) -> float:
        """Returns the value at a coordinate, rounded to 2 digits; to integers if `low` is one."""
        rounded = float(f"{2.0 ** (-x if self.is_decay else x):.1e}")
        if self.is_decay:
            return round(1 - rounded, 9)
        return max(round(rounded), 1) if isinstance(self.low, int) else rounded

    @property
    def step(self) -> float:
        """The distance between neighbors of the grid, in powers of 2."""
        return (self.x(self.high) - self.x(self.low)) / (self.points - 1)

    @property
    def grid(self) -> list[float]:
        """The values that are tried first, in ascending order."""
        return sorted({self.value(self.x(self.low) + n * self.step) for n in range(self.points)})


tuned = Tuned


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A study: arms, seeds, and how to compare the arms.

    `declared` maps each property in which arms may differ, although no varied field sets it, to a
    reason: parameters, flops, attention, data, tokenizer or warmup (lab/guard.py). Example:
    {"parameters": "T5's bias has 128 numbers"}. Two arms that build the same programs are an error
    unless one is a control. `controls` maps such arms to reasons: {"again": "other spelling"}."""

    grid: Grid
    question: str = ""
    baseline: str = ""  # name of an arm; "": the first
    seeds: int | tuple[int, ...] = 3
    metric: str = "test/loss"  # the primary metric, by which arms are compared
    higher_is_better: bool | None = None  # None: as the metric's name implies
    declared: Mapping[str, str] = dataclasses.field(default_factory=dict)
    match: str = ""  # to the baseline: parameters, flops (both by d_ff), or time (by steps)
    controls: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tune: Tuned | tuple[Tuned, ...] = ()
    tune_seeds: int = 1
    # Of lab/ladder.py: arm -> its "arm" and "size", "N" parameters, and whether it is "held_out".
    ladder: Mapping[str, Mapping] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.grid, Grid):
            one = "vary(FIELD, VALUE, ...), arms(NAME={...})"
            way_out = f"{one}, or several of them in product(), zipped() or chain()"
            raise UserError(f"sweep: {self.grid!r}; a Grid is expected: {way_out}")
        names = [point.name for point in self.grid]
        if not names:
            raise UserError("sweep: no arms")
        way_out = "with vary(field, NAME=value) or arms(NAME={...})"
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"sweep: two arms are called {name!r}; name them {way_out}")
            if name in RESERVED:
                problem = f"an arm is called {name!r}, which is a reserved folder name"
                raise UserError(f"sweep: {problem}; name it {way_out}")
            if not re.fullmatch(r"[A-Za-z0-9][\w.=+-]*", name):
                raise UserError(f"sweep: {name!r} is not a valid folder name; name it {way_out}")
        if self.baseline and self.baseline not in names:
            way_out = nearest(self.baseline, names)
            raise UserError(f"sweep: baseline {self.baseline!r} is not an arm; {way_out}")
        seeds = tuple(range(self.seeds)) if isinstance(self.seeds, int) else tuple(self.seeds)
        valid = seeds and all(type(seed) is int and seed >= 0 for seed in seeds)
        if not valid or len(set(seeds)) < len(seeds):
            way_out = "set a positive number or a list of distinct seeds"
            raise UserError(f"sweep: seeds: {self.seeds!r}; {way_out}")
        if any("seed" in point.changes for point in self.grid):
            raise UserError("sweep: 'seed' varies in the grid; use Sweep(..., seeds=N)")
        if self.match not in ("", "parameters", "flops", "time"):
            raise UserError(f"sweep: match: {self.match!r}; choose from: parameters, flops, time")
        for name, example in (("controls", "ARM"), ("declared", "data")):
            if not isinstance(value := getattr(self, name), Mapping):
                raise UserError(f"sweep: {name}: {value!r}; set a dict, {{{example!r}: 'reason'}}")
        if unknown := [arm for arm in self.controls if arm not in names]:
            suggested = nearest(unknown[0], names)
            raise UserError(f"sweep: controls: {unknown[0]!r} is not an arm; {suggested}")
        direction = higher_is_better(self.metric, self.higher_is_better)
        object.__setattr__(self, "higher_is_better", direction)
        object.__setattr__(self, "baseline", self.baseline or names[0])
        object.__setattr__(self, "seeds", seeds)
        self._check_tuning()

    def _check_tuning(self) -> None:
        numbers = (self.tune,) if isinstance(self.tune, Tuned) else tuple(self.tune)
        object.__setattr__(self, "tune", numbers)
        for number in numbers:
            if not isinstance(number, Tuned):
                raise UserError(f"sweep: tune: {number!r}; set tuned(FIELD, LOW, HIGH)")
            if number.field in self.fields:
                raise UserError(f"sweep: tune: {number.field!r} also varies in the grid; drop one")
        if len({number.field for number in numbers}) < len(numbers) or len(numbers) > 3:
            raise UserError(f"sweep: tune: {len(numbers)} numbers; set up to three different ones")
        if type(self.tune_seeds) is not int or self.tune_seeds < 1:
            raise UserError(f"sweep: tune_seeds: {self.tune_seeds!r}; set a positive number")
        if self.tune_seeds > 1 and not numbers:
            raise UserError("sweep: tune_seeds: has no effect without tune=tuned(...)")

    def reference(self, arm: str) -> str:
        """Returns the arm to match: the baseline or, in a ladder, the baseline of that size."""
        size = lambda name: self.ladder[name]["size"]
        same = [x for x in self.ladder if x in self.points and size(x) == size(arm)]
        alike = [x for x in same if self.ladder[x]["arm"] == self.ladder[self.baseline]["arm"]]
        return alike[0] if alike else self.baseline

    @property
    def tuning_runs(self) -> int:
        """The number of tuning runs of each arm."""
        numbers = (self.tune,) if isinstance(self.tune, Tuned) else self.tune
        return self.tune_seeds * sum(len(number.grid) + number.more for number in numbers)

    @property
    def arms(self) -> dict[str, Changes]:
        """Arm name -> its changes, baseline first."""
        return {name: point.changes for name, point in self.points.items()}

    @property
    def points(self) -> dict[str, Point]:
        """Arm name -> its point, baseline first."""
        points = {point.name: point for point in self.grid}
        return {self.baseline: points.pop(self.baseline)} | points

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields that vary."""
        return tuple(dict.fromkeys(field for changes in self.arms.values() for field in changes))


def _joined(one: Point, other: Point) -> Point:
    name = f"{one.name}-{other.name}"
    if repeated := one.changes.keys() & other.changes.keys():
        raise UserError(f"sweep: {repeated.pop()!r} is set twice in one arm ({name})")
    return Point(name, {**one.changes, **other.changes}, {**one.called, **other.called})


def _point_name(field: str, value) -> str:
    """Returns a short name for a value, with the field where the value alone is ambiguous."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Mapping):
        options = [f"{key}={x}" for key, x in value.items() if key != "name"]
        return "+".join([str(value.get("name", field.rpartition(".")[2])), *options])
    if isinstance(value, (list, tuple)):
        return f"{field.rpartition('.')[2]}=" + "+".join(map(str, value))
    return f"{field.rpartition('.')[2]}={value}"
