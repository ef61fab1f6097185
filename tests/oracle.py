"""A slow and obvious forward pass in NumPy and float64, written from the papers' equations.

It computes one sequence, one head and one query at a time. It shares no code with the package: it
reads only the fields of a config and the parameters of an unrolled model. Lower-case letters are
vectors of one token. Tokens are indexed by t (queries) and s (keys), heads by n.
"""

import functools
import math

import numpy as np
from oracle_positions import add_positions, choose, clip, rotate, sinusoid
from oracle_streams import TOPOLOGIES

erf = np.vectorize(math.erf)

# name -> (norm of the input, norm of the branch, norm of the sum, final norm, learned gate,
#          residual scale a; None: by depth)
PLACEMENTS = {
    "pre": (1, 0, 0, 1, 0, 1.0),
    "post": (0, 0, 1, 0, 0, 1.0),
    "peri": (1, 1, 0, 1, 0, 1.0),
    "res_post": (0, 1, 0, 1, 0, 1.0),
    "deepnorm": (0, 0, 1, 0, 0, None),
    "none": (0, 0, 0, 0, 0, 1.0),
    "rezero": (0, 0, 0, 0, 1, 1.0),
}
PARTS = ("in_norm", "res_norm", "out_norm", "final_norm", "gate", "residual_scale")


def forward(config, params, *sides, **where):
    """Returns the logits float64[B, T, V] of tokens [B, T], or of source and target.

    `where` contains the keyword arguments of `model.apply` (segments, positions).
    """
    p = _float64(params)
    run = {"encoder": _encoder_only, "decoder": _decoder_only, "encoder_decoder": _encoder_decoder}[
        config.family
    ]
    logits = []
    for b in range(len(sides[0])):
        sequence_where = {k: np.asarray(v)[b if len(v) > 1 else 0] for k, v in where.items()}
        logits.append(run(config, p, *(np.asarray(side)[b] for side in sides), **sequence_where))
    return np.stack(logits)


def _float64(tree):
    return (
        {k: _float64(v) for k, v in tree.items()}
        if isinstance(tree, dict)
        else np.asarray(tree, np.float64)
    )


def _encoder_only(c, p, tokens, token_types=None, **where):
    x = embed(c, p["embedding"], tokens, token_types)
    return unembed(
        c, p, stack(c, p["encoder"], "encoder", x, token_info(c, tokens, **where)), p["embedding"]
    )


def _decoder_only(c, p, tokens, **where):
    x = embed(c, p["embedding"], tokens)
    return unembed(
        c, p, stack(c, p["decoder"], "decoder", x, token_info(c, tokens, **where)), p["embedding"]
    )


def _encoder_decoder(c, p, source, target, **where):
    target_where = {k: v for k, v in where.items() if not k.startswith("source_")}
    source_where = {
        k.removeprefix("source_"): v for k, v in where.items() if k.startswith("source_")
    }
    table = p["embedding"] if c.share_embeddings else p["target_embedding"]
    source_info = token_info(c, source, **source_where)
    own = c.part(**dict(c.encoder))
    encoded = stack(own, p["encoder"], "encoder", embed(own, p["embedding"], source), source_info)
    h = stack(
        c,
        p["decoder"],
        "decoder",
        embed(c, table, target),
        token_info(c, target, **target_where),
        encoded,
        source_info,
    )
    return unembed(c, p, h, table)


def token_info(c, tokens, positions=None, segment_ids=None, padding_mask=None, prefix_mask=None):
    """Returns (position, document, in a prefix?) for each token; document 0 is padding."""
    if positions is None:
        positions = np.arange(len(tokens))
    if segment_ids is None:
        segment_ids = np.ones(len(tokens)) if padding_mask is None else padding_mask
    prefix = np.zeros(len(tokens), bool) if prefix_mask is None else np.asarray(prefix_mask, bool)
    return np.asarray(positions), np.asarray(segment_ids, int), prefix


def embed(c, p, tokens, token_types=None):
    x = p["embedding"][tokens]
    if c.d_embedding:
        x = x @ p["project"]["kernel"]
    if c.embedding_scale:
        x = x * math.sqrt(c.d_model)
    if c.token_types:
        x = x + p["token_types"][np.zeros(len(tokens), int) if token_types is None else token_types]
    return x


def unembed(c, p, h, table):
    unembedding = p.get("unembedding", {})
    if c.head_transform:
        h = linear(unembedding["transform"], h)
        h = norm(c, unembedding["norm"], activate(c, h))
    if c.d_embedding:
        h = linear(unembedding["project"], h)
    matrix = table["embedding"].T if c.tie_embeddings else unembedding["kernel"]
    logits = (c.logit_scale * h) @ matrix
    if c.logit_bias:
        logits = logits + unembedding["bias"]
    return cap(logits, c.logit_soft_cap)


def canon(c, w, place, x, info):
    """Adds w_0 x_t + ... + w_3 x_(t - 3), over the tokens of t's document, to each x_t."""
    if place not in c.canon:
        return x
    out, documents = x.copy(), info[1]
    for t in range(len(x)):
        for i in range(min(t + 1, 4)):
            out[t] += w[i] * x[t - i] * (documents[t - i] == documents[t])
    return out


def cap(x, limit):
    return limit * np.tanh(x / limit) if limit else x


def linear(p, x):
    return x @ p["kernel"] + p.get("bias", 0.0)


def activate(c, x):
    if c.activation == "relu":
        return np.maximum(x, 0)
    if c.activation in ("relu_squared", "linear"):
        return np.maximum(x, 0) ** 2 if c.activation == "relu_squared" else x
    if c.activation == "gelu":
        return x * (1 + erf(x / math.sqrt(2))) / 2
    if c.activation == "quick_gelu":
        return x / (1 + np.exp(-1.702 * x))
    if c.activation == "gelu_tanh":
        return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return x / (1 + np.exp(-x))


def normalized_head(c, p, kind, head, n):
    """Returns the n-th head, head(n), normalized alone or, if joint, together with all others."""
    gains, others = p.get(f"{kind}_norm", {}), [n]
    if c.qk_norm_joint:
        others = range(p[kind]["kernel"].shape[1])
    heads = norm(c, gains, np.concatenate([head(i) for i in others], axis=-1))
    return np.split(heads, len(others), axis=-1)[n if c.qk_norm_joint else 0]


def norm(c, p, x):
    """Normalizes over the last axis."""
    if c.norm in ("layernorm", "detach_norm"):
        x = x - x.mean(-1, keepdims=True)
    if c.norm == "dynamic_tanh":
        return np.tanh(p["alpha"] * x) * p.get("gain", 1.0) + p.get("offset", 0.0)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_epsilon)
    gain = p.get("gain", 1.0 - c.norm_zero_centered)
    return x * (gain + c.norm_zero_centered) + p.get("offset", 0.0)


def placement(c, side):
    """Returns (in, res, out, final, gate, a), the parts of the residual formula."""
    spec = c.norm_placement
    name, overrides = (spec, {}) if isinstance(spec, str) else (spec["name"], dict(spec))
    if name in TOPOLOGIES:
        return 0, 0, 0, 0, 0, 1.0
    if name not in PLACEMENTS:
        raise NotImplementedError(f"write {name!r} in PLACEMENTS, in tests/oracle.py")
    parts = dict(zip(PARTS, PLACEMENTS[name], strict=True))
    n, m = c.num_layers("encoder"), c.num_layers("decoder")
    if name == "deepnorm":
        parts["residual_scale"] = (
            (2 * (n + m)) ** 0.25
            if not (n and m)
            else (3 * m) ** 0.25
            if side == "decoder"
            else 0.81 * (n**4 * m) ** (1 / 16)
        )
    parts |= overrides
    return tuple(parts[part] for part in PARTS)


def embed_positions(c, p, x, info, specs, suffix):
    """Adds the position embeddings that precede the first layer to the residual stream."""
    for spec in specs:
        name, options = choose(spec)
        if name == "learned":
            x = x + p["position_embedding" + suffix(spec)][info[0] + options.get("offset", 0)]
        if name == "sinusoidal":
            base, layout = options.get("base", 1e4), options.get("layout", "interleaved")
            x = x + np.stack([sinusoid(t, c.d_model, base, layout) for t in info[0]])
    return x


def residual(c, r, x, fs, parts, bare):
    """out_norm(a x + sum over f of gate l res_norm(f(in_norm(x)))); `bare` omits in_norm."""
    in_norm, res_norm, out_norm, _, gate, a = parts
    y = a * x
    for j, f in enumerate(fs):
        suffix = f"_{j}" if j else ""
        h = f(norm(c, r.get("in_norm" + suffix, {}), x) if in_norm and not bare else x)
        h = norm(c, r.get("res_norm" + suffix, {}), h) if res_norm else h
        y = y + (r["gate" + suffix] * h if gate else h) * r.get("layer_scale" + suffix, 1.0)
    return norm(c, r.get("out_norm", {}), y) if out_norm else y


def stack(c, p, side, x, info, encoded=None, source=None):
    parts = placement(c, side)
    depth = c.num_layers(side)
    pattern = c.layer_pattern or ({},)
    entries = [pattern[i % len(pattern)] for i in range(depth)]
    specs = list(dict.fromkeys(entry.get("position", c.position) for entry in entries))
    suffix = lambda spec: f"_{specs.index(spec)}" if specs.index(spec) else ""
    x = embed_positions(c, p, x, info, specs, suffix)
    if c.embedding_norm:
        x = norm(c, p.get("embedding_norm", {}), x)
    chosen, options = choose(c.norm_placement)
    topology, streams, first_values = TOPOLOGIES.get(chosen), None, {}
    for i, entry in enumerate(entries):
        layer, spec = p[f"layers_{i}"], entry.get("position", c.position)
        window = entry.get("window", c.window)
        shared = {
            k.removesuffix(suffix(spec)): v for k, v in p.items() if not k.startswith("layers_")
        }
        self_arguments = info, info, side == "decoder", window, choose(spec), shared
        conv = lambda h: canon(c, layer.get("canon_A"), "A", h, info)
        sublayers = {
            "self_attention": lambda h: attention(
                c, layer["self_attention"], conv(h), conv(h), *self_arguments, first_values
            )
        }
        if encoded is not None:
            cross = layer["cross_attention"].items()
            cross = {name.removeprefix("position_"): x for name, x in cross}
            scheme = choose(c.cross_position)
            sublayers["cross_attention"] = lambda h: attention(
                c, cross, h, encoded, info, source, False, 0, scheme, cross
            )
        sublayers["feed_forward"] = lambda h: feed_forward(
            c, layer["feed_forward"], canon(c, layer.get("canon_C"), "C", h, info), info
        )
        if topology is not None:
            for j, (name, f) in enumerate(sublayers.items()):
                r = layer.get(f"{name}_residual", {})
                of_sublayer = lambda name, x, r=r: norm(c, r.get(name, {}), x)
                streams = streams or topology(x, options, (depth, len(sublayers)))
                branch = f
                if options.get("res_norm"):
                    branch = lambda h, f=f, n=of_sublayer: n("res_norm", f(h))
                streams.apply(branch, of_sublayer, r, i, j)
            continue
        if c.parallel:
            branches, bare = tuple(sublayers.values()), not c.first_norm and i == 0
            x = residual(c, layer.get("residual", {}), x, branches, parts, bare)
            continue
        for j, (name, f) in enumerate(sublayers.items()):
            r = layer.get(f"{name}_residual", {})
            x = residual(c, r, x, (f,), parts, not c.first_norm and i == 0 and j == 0)
    if topology is not None:
        return streams.end(lambda name, x: norm(c, p.get(name, {}), x), p)
    return norm(c, p.get("final_norm", {}), x) if parts[3] else x


def feed_forward(c, p, x, info):
    if "router" in p:
        shared = feed_forward(c, p["shared"], x, info) if "shared" in p else 0.0
        return np.stack([mixture(c, p, token) for token in x]) + shared
    return linear(p["out"], hidden_units(c, p, x, info))


def hidden_units(c, p, x, info):
    h = canon(c, p.get("canon_D_in"), "D", linear(p["in"], x), info)
    if not c.glu:
        return activate(c, h)
    gate = canon(c, p.get("canon_D_gate"), "D", linear(p["gate"], x), info)
    if c.glu_limit:
        gate, h = np.minimum(gate, c.glu_limit), np.clip(h, -c.glu_limit, c.glu_limit) + 1
    return activate(c, gate) * h


def mixture(c, p, x):
    """Computes one token with its `top_k` best experts, one after another; drops no token."""
    options = dict(c.feed_forward)
    logits = linear(p["router"], x)
    p_e = np.exp(logits) / np.exp(logits).sum()
    if options.get("score") == "sigmoid":
        p_e = 1 / (1 + np.exp(-logits))
    best = np.argsort(-p_e - p.get("router_bias", 0.0))[: options["top_k"]]
    total = p_e[best].sum() if options.get("normalize", True) else 1.0
    y = 0.0
    for e in best:
        matrices = [name for name in ("in", "gate", "out") if name in p]
        expert = {name: {field: x[e] for field, x in p[name].items()} for name in matrices}
        y = y + p_e[e] / total * linear(expert["out"], hidden_units(c, expert, x, None))
    return y


def attention(c, p, x, y, q_info, k_info, causal, window, position, shared, first_values=None):
    """Computes attention from x to y; `q_info` and `k_info` are the results of `token_info`.

    `first_values` holds the first layer's values by head; the first layer fills it in.
    """
    name, options = position
    scale = c.head_size**-0.5 if c.attention_scale is None else c.attention_scale
    out, earlier = np.zeros(x.shape), dict(first_values or {})
    for n in range(c.num_heads):
        q, k, v = projected(c, p, n, x, y, q_info, k_info, position)
        if c.value_residual and first_values is not None:
            first = first_values.setdefault(n, v)
            weights = p.get("value_residual", (0.5, 0.5))
            v = weights[0] * first + weights[1] * v if n in earlier else v
        for t in range(len(q)):
            allowed = lambda s, t=t: (
                q_info[1][t] == k_info[1][s] > 0
                and (not causal or k_info[0][s] <= q_info[0][t] or k_info[2][s])
                and (not window or abs(q_info[0][t] - k_info[0][s]) < window)
            )
            mask = np.array([allowed(s) for s in range(len(k))])
            if not mask.any():
                continue
            e = np.array([scale * (q[t] @ k[s]) for s in range(len(k))])
            if c.attention_score == "additive":
                e = np.array([p["additive"][n] @ np.tanh(q[t] + k[s]) for s in range(len(k))])
            scheme, of_mask = (c, name, options, p, shared), (scale, causal and not c.prefix_lm)
            e = add_positions(*scheme, n, e, q[t], k, q_info[0][t], k_info[0], mask, *of_mask)
            e = cap(e, c.attention_soft_cap)
            w = np.exp(np.where(mask, e - e[mask].max(), -np.inf))
            total = w.sum() + (math.exp(p["sink"][n] - e[mask].max()) if c.attention_sink else 0.0)
            w = w / total
            value = w @ v
            if name == "shaw" and options.get("values", True):
                limit = options.get("max_distance", 16)
                value = value + sum(
                    w[s] * p["relative_values"][clip(k_info[0][s] - q_info[0][t], limit) + limit]
                    for s in range(len(k))
                )
            if c.attention_gate:
                value = value / (1.0 + np.exp(-(x[t] @ p["gate"]["kernel"][:, n])))
            if c.attention_out:
                out[t] += value @ p["out"]["kernel"][n]
            else:
                out[t, n * len(value) : (n + 1) * len(value)] = value
    return out + p.get("out", {}).get("bias", 0.0)


def projected(c, p, n, x, y, q_info, k_info, position):
    """Returns the queries, keys and values of head n, normalized and rotated."""
    (name, options), m = position, n // (c.num_heads // c.kv_heads)
    head = lambda kind, inputs, h: (
        inputs @ p[kind]["kernel"][:, h] + (p[kind]["bias"][h] if "bias" in p[kind] else 0.0)
    )
    q, k, v = head("query", x, n), head("key", y, m), head("value", y, m)
    if c.qk_norm:
        q = normalized_head(c, p, "query", functools.partial(head, "query", x), n)
        k = normalized_head(c, p, "key", functools.partial(head, "key", y), m)
    v = norm(c, p.get("value_norm", {}), v) if c.v_norm else v
    q = q @ p["bilinear"][n] if c.attention_score == "bilinear" else q
    if "canon_B_query" in p:
        of_head = lambda x, kind, h: canon(c, p[f"canon_B_{kind}"][:, h], "B", x, q_info)
        q, k, v = of_head(q, "query", n), of_head(k, "key", m), of_head(v, "value", m)
    if name in ("rotary", "xpos"):
        length = int(q_info[0].max()) + 1
        turn = lambda x, at, sign: np.stack(
            [rotate(name, options, x[t], at[t], length, sign) for t in range(len(x))]
        )
        q, k = turn(q, q_info[0], 1), turn(k, k_info[0], -1)
    return q, k, v
