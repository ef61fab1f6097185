"""Settings of a config.json that differ between layers."""

from transformer.convert.fields import Fields, shown


def layer_kinds(f: Fields, layers: int) -> list[str] | None:
    """Returns `layer_types`, which has one entry per layer, or None if it is missing or null."""
    kinds = f.get("layer_types")
    if kinds is None:
        return None
    if unknown := [k for k in kinds if k not in ("sliding_attention", "full_attention")]:
        raise f.error("layer_types", f"has {shown(unknown[0])}, which is not supported")
    if len(kinds) != layers:
        raise f.error("layer_types", f"has {len(kinds)} entries for {layers} layers")
    return kinds


def per_layer(**fields: list) -> dict:
    """Returns the fields of a ModelConfig for lists of one value per layer. Those that differ
    between layers form `layer_pattern`: the shortest that, repeated, gives them."""
    fixed = {name: xs[0] for name, xs in fields.items() if xs.count(xs[0]) == len(xs)}
    varied = {name: xs for name, xs in fields.items() if name not in fixed}
    if not varied:
        return fixed
    columns = zip(*varied.values(), strict=True)
    layers = [dict(zip(varied, values, strict=True)) for values in columns]
    period = next(p for p in range(1, len(layers) + 1) if layers[:-p] == layers[p:])
    return fixed | {"layer_pattern": tuple(layers[:period])}
