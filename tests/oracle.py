"""A slow and obvious forward pass: NumPy, float64, one row, one head, one query at a time, from the papers' equations.

It shares no code with the package: it reads the numbers of a config and the parameters of an unrolled model, nothing else.
Lower-case letters are vectors of one token; tokens are counted by t (queries) and s (keys), heads by n.
"""

import math

import numpy as np

erf = np.vectorize(math.erf)

PLACEMENTS = {  # name -> (norm of the input, of the branch, of the sum; final norm; learned gate)
    "pre": (1, 0, 0, 1, 0),
    "post": (0, 0, 1, 0, 0),
    "peri": (1, 1, 0, 1, 0),
    "res_post": (0, 1, 0, 1, 0),
    "deepnorm": (0, 0, 1, 0, 0),
    "none": (0, 0, 0, 0, 0),
    "rezero": (0, 0, 0, 0, 1),
}


def forward(config, params, *sides, **where):
    """Logits float64[B, T, V] of tokens [B, T], or of source and target; `where` as for `model.apply` (segments, positions)."""
    p = _float64(params["params"])
    one = {"encoder": _encoder_only, "decoder": _decoder_only, "encoder_decoder": _both}[
        config.family
    ]
    rows = []
    for b in range(len(sides[0])):
        own = {k: np.asarray(v)[b if len(v) > 1 else 0] for k, v in where.items()}
        rows.append(one(config, p, *(np.asarray(side)[b] for side in sides), **own))
    return np.stack(rows)


def _float64(tree):
    return (
        {k: _float64(v) for k, v in tree.items()}
        if isinstance(tree, dict)
        else np.asarray(tree, np.float64)
    )


def _encoder_only(c, p, tokens, token_types=None, **where):
    x = embed(c, p["embedding"], tokens, token_types)
    return unembed(
        c, p, stack(c, p["encoder"], "encoder", x, stands(c, tokens, **where)), p["embedding"]
    )


def _decoder_only(c, p, tokens, **where):
    x = embed(c, p["embedding"], tokens)
    return unembed(
        c, p, stack(c, p["decoder"], "decoder", x, stands(c, tokens, **where)), p["embedding"]
    )


def _both(c, p, source, target, **where):
    here = {k: v for k, v in where.items() if not k.startswith("source_")}
    there = {k.removeprefix("source_"): v for k, v in where.items() if k.startswith("source_")}
    table = p["embedding"] if c.share_embeddings else p["target_embedding"]
    read = stands(c, source, **there)
    encoded = stack(c, p["encoder"], "encoder", embed(c, p["embedding"], source), read)
    h = stack(
        c,
        p["decoder"],
        "decoder",
        embed(c, table, target),
        stands(c, target, **here),
        encoded,
        read,
    )
    return unembed(c, p, h, table)


def stands(c, tokens, positions=None, segment_ids=None, padding_mask=None, prefix_mask=None):
    """(position, document, is it of a prefix?) of every token; document 0 is padding."""
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
    own = p.get("unembedding", {})
    if c.head_transform:
        h = linear(own["transform"], h)
        h = norm(c, own["norm"], activate(c, h))
    if c.d_embedding:
        h = linear(own["project"], h)
    matrix = table["embedding"].T if c.tie_embeddings else own["kernel"]
    logits = (c.logit_scale * h) @ matrix
    if c.logit_bias:
        logits = logits + own["bias"]
    return cap(logits, c.logit_soft_cap)


def cap(x, most):
    return most * np.tanh(x / most) if most else x


def linear(p, x):
    return x @ p["kernel"] + p.get("bias", 0.0)


def activate(c, x):
    if c.activation == "relu":
        return np.maximum(x, 0)
    if c.activation == "gelu":
        return x * (1 + erf(x / math.sqrt(2))) / 2
    if c.activation == "gelu_tanh":
        return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return x / (1 + np.exp(-x))


def norm(c, p, x):
    """Over the last axis."""
    if c.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_epsilon)
    gain = p.get("gain", 1.0 - c.norm_zero_centered)
    return x * (gain + c.norm_zero_centered) + p.get("offset", 0.0)


def placement(c, side):
    """(in, res, out, final, gate, a): the parts of the residual formula."""
    spec = c.norm_placement
    name, given = (spec, {}) if isinstance(spec, str) else (spec["name"], dict(spec))
    parts = dict(
        zip(
            ("in_norm", "res_norm", "out_norm", "final_norm", "gate"), PLACEMENTS[name], strict=True
        )
    )
    n, m = c.num_encoder_layers, c.num_decoder_layers
    a = 1.0
    if name == "deepnorm":
        a = (
            (2 * (n + m)) ** 0.25
            if not (n and m)
            else (3 * m) ** 0.25
            if side == "decoder"
            else 0.81 * (n**4 * m) ** (1 / 16)
        )
    parts = parts | {"residual_scale": a} | given
    return tuple(
        parts[k]
        for k in ("in_norm", "res_norm", "out_norm", "final_norm", "gate", "residual_scale")
    )


def choose(spec):
    return (
        (spec, {})
        if isinstance(spec, str)
        else (spec["name"], {k: v for k, v in spec.items() if k != "name"})
    )


def stack(c, p, side, x, here, encoded=None, there=None):
    in_norm, res_norm, out_norm, final_norm, gate, a = placement(c, side)
    depth = c.num_encoder_layers if side == "encoder" else c.num_decoder_layers
    pattern = c.layer_pattern or ({},)
    of_layer = [pattern[i % len(pattern)] for i in range(depth)]
    specs = list(dict.fromkeys(own.get("position", c.position) for own in of_layer))
    suffix = lambda spec: f"_{specs.index(spec)}" if specs.index(spec) else ""
    for spec in specs:
        name, given = choose(spec)
        if name == "learned":
            x = x + p["position_embedding" + suffix(spec)][here[0] + given.get("offset", 0)]
        if name == "sinusoidal":
            x = x + np.stack(
                [
                    sinusoid(
                        t, c.d_model, given.get("base", 1e4), given.get("layout", "interleaved")
                    )
                    for t in here[0]
                ]
            )
    if c.embedding_norm:
        x = norm(c, p.get("embedding_norm", {}), x)
    for i, own in enumerate(of_layer):
        layer, spec = p[f"layers_{i}"], own.get("position", c.position)
        window = own.get("window", c.window)
        shared = {
            k.removesuffix(suffix(spec)): v for k, v in p.items() if not k.startswith("layers_")
        }
        sublayers = {
            "self_attention": lambda h: attention(
                c,
                layer["self_attention"],
                h,
                h,
                here,
                here,
                side == "decoder",
                window,
                choose(spec),
                shared,
            )
        }
        if encoded is not None:
            sublayers["cross_attention"] = lambda h: attention(
                c, layer["cross_attention"], h, encoded, here, there, False, 0, ("none", {}), {}
            )
        sublayers["feed_forward"] = lambda h: feed_forward(c, layer["feed_forward"], h)

        def branch(f, x, r, at, skip):
            h = norm(c, r.get("in_norm" + at, {}), x) if in_norm and not skip else x
            h = f(h)
            h = norm(c, r.get("res_norm" + at, {}), h) if res_norm else h
            return r["gate" + at] * h if gate else h

        if c.parallel:
            r = layer.get("residual", {})
            y = a * x + sum(
                branch(f, x, r, f"_{j}" if j else "", not c.first_norm and i == 0)
                for j, f in enumerate(sublayers.values())
            )
            x = norm(c, r.get("out_norm", {}), y) if out_norm else y
            continue
        for j, (name, f) in enumerate(sublayers.items()):
            r = layer.get(f"{name}_residual", {})
            y = a * x + branch(f, x, r, "", not c.first_norm and i == 0 and j == 0)
            x = norm(c, r.get("out_norm", {}), y) if out_norm else y
    return norm(c, p.get("final_norm", {}), x) if final_norm else x


def feed_forward(c, p, x):
    if not isinstance(c.feed_forward, str):
        return np.stack([mixture(c, p, token) for token in x])
    h = linear(p["in"], x)
    h = activate(c, linear(p["gate"], x)) * h if c.glu else activate(c, h)
    return linear(p["out"], h)


def mixture(c, p, x):
    """One token, its `top_k` best experts, one after another; nothing is dropped."""
    options = dict(c.feed_forward)
    p_e = np.exp(x @ p["router"]["kernel"])
    p_e = p_e / p_e.sum()
    best = np.argsort(-p_e)[: options["top_k"]]
    total = p_e[best].sum() if options.get("normalize", True) else 1.0
    y = 0.0
    for e in best:
        own = lambda name: {field: x[e] for field, x in p[name].items()}
        h = linear(own("in"), x)
        h = activate(c, linear(own("gate"), x)) * h if c.glu else activate(c, h)
        y = y + p_e[e] / total * linear(own("out"), h)
    return y


def sinusoid(t, d, base=1e4, layout="interleaved"):
    out = np.zeros(d)
    for i in range(d // 2):
        angle = t / base ** (2 * i / d)
        at = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + d // 2)
        out[at[0]], out[at[1]] = math.sin(angle), math.cos(angle)
    return out


def attention(c, p, x, y, here, there, causal, window, position, shared):
    """One head, one query at a time."""
    name, given = position
    per_kv = c.num_heads // c.num_kv_heads
    scale = c.d_head**-0.5 if c.attention_scale is None else c.attention_scale
    out = np.zeros(x.shape)
    for n in range(c.num_heads):
        part = lambda which, inputs, h: (
            inputs @ p[which]["kernel"][:, h] + (p[which]["bias"][h] if "bias" in p[which] else 0.0)
        )
        q, k, v = part("query", x, n), part("key", y, n // per_kv), part("value", y, n // per_kv)
        if c.qk_norm:
            q, k = norm(c, p.get("query_norm", {}), q), norm(c, p.get("key_norm", {}), k)
        if name in ("rotary", "xpos"):
            length = int(here[0].max()) + 1
            q = np.stack([turn(name, given, q[t], here[0][t], length, 1) for t in range(len(q))])
            k = np.stack([turn(name, given, k[s], there[0][s], length, -1) for s in range(len(k))])
        for t in range(len(q)):
            may = np.array([
                here[1][t] == there[1][s] and there[1][s] > 0
                and (not causal or there[0][s] <= here[0][t] or there[2][s])
                and (not window or abs(here[0][t] - there[0][s]) < window)
                for s in range(len(k))
            ])  # fmt: skip
            if not may.any():
                continue
            e = np.array([scale * (q[t] @ k[s]) for s in range(len(k))])
            e = positioned(
                c,
                name,
                given,
                p,
                shared,
                n,
                e,
                q[t],
                k,
                here[0][t],
                there[0],
                may,
                scale,
                causal and not c.prefix_lm,
            )
            e = cap(e, c.attention_soft_cap)
            w = np.where(may, np.exp(e - e[may].max()), 0.0)
            total = w.sum() + (math.exp(p["sink"][n] - e[may].max()) if c.attention_sink else 0.0)
            w = w / total
            read = w @ v
            if name == "shaw" and given.get("values", True):
                most = given.get("max_distance", 16)
                read = read + sum(
                    w[s] * p["relative_values"][clip(there[0][s] - here[0][t], most) + most]
                    for s in range(len(k))
                )
            out[t] += read @ p["out"]["kernel"][n]
    return out + p["out"].get("bias", 0.0)


def clip(d, most):
    return int(max(-most, min(most, d)))


def turn(name, given, x, t, length, direction):
    """R_t x; for xPos also times zeta^t (queries) or zeta^-t (keys)."""
    x, theta = x.copy(), given.get("theta", 1e4)
    d = int(len(x) * given.get("fraction", 1.0))
    scaling, more = choose(given.get("scaling", "none"))
    old, factor = more.get("original_length"), more.get("factor", 1.0)
    magnitude = 1.0
    if scaling == "ntk":
        theta = theta * factor ** (d / (d - 2))
    if scaling == "dynamic":
        theta = theta * (factor * max(length, old) / old - (factor - 1)) ** (d / (d - 2))
    for i in range(d // 2):
        f = theta ** (-2 * i / d)
        if scaling == "linear":
            f = f / factor
        if scaling == "llama3":
            wavelength, low, high = (
                2 * math.pi / f,
                more.get("low_frequency_factor", 1.0),
                more.get("high_frequency_factor", 4.0),
            )
            if wavelength > old / low:
                f = f / factor
            elif wavelength > old / high:
                smooth = (old / wavelength - low) / (high - low)
                f = (1 - smooth) * f / factor + smooth * f
        if scaling == "yarn":
            pair = lambda turns: d * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))
            low, high = pair(more.get("beta_fast", 32)), pair(more.get("beta_slow", 1))
            if more.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, d - 1)
            ramp = min(max((i - low) / max(high - low, 1e-3), 0), 1)
            f = f / factor * ramp + f * (1 - ramp)
            magnitude = more.get("attention_factor") or 0.1 * math.log(factor) + 1
        a, b = (i, i + d // 2) if given.get("layout", "halves") == "halves" else (2 * i, 2 * i + 1)
        zeta = 1.0
        if name == "xpos":
            gamma = given.get("gamma", 0.4)
            zeta = ((2 * i / d + gamma) / (1 + gamma)) ** (
                direction * t / given.get("scale_base", 512.0)
            )
        cos, sin = magnitude * zeta * math.cos(t * f), magnitude * zeta * math.sin(t * f)
        x[a], x[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return x


def positioned(c, name, given, p, shared, n, e, q, k, t, positions, may, scale, causal):
    """The logits of one query and head with position in them."""
    e, heads = e.copy(), c.num_heads
    if name == "cope":
        most, table = given.get("max_positions", 64), p["contextual_positions"]
        gates = np.where(may, 1 / (1 + np.exp(-e)), 0.0)
        for s in range(len(k)):
            count = min(gates[s:].sum(), most - 1)
            low = math.floor(count)
            high = math.ceil(count)
            vector = (1 - (count - low)) * table[low] + (count - low) * table[high]
            e[s] += q @ vector
        return e
    for s, at in enumerate(positions):
        d = int(t - at)
        if name == "alibi":
            power = 2 ** int(math.log2(heads))
            slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
            slopes += [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * (heads - power), 2)]
            e[s] -= slopes[n] * abs(d)
        elif name == "t5":
            e[s] += shared["relative_bias"][
                t5_bucket(-d, given.get("num_buckets", 32), given.get("max_distance", 128), causal),
                n,
            ]
        elif name == "kerple":
            e[s] -= max(shared["kernel_r"][n], 0.01) * math.log(
                1 + max(shared["kernel_a"][n], 0.01) * abs(d)
            )
        elif name == "sandwich":
            width, first = given.get("width", 128), given.get("first_index", 0)
            indices = range(first, first + width // 2)
            total = sum(math.cos(abs(d) / 1e4 ** (2 * i / width)) for i in indices)
            e[s] += (total - width / 2) / (8 * (n + 1) / heads)
        elif name == "fire":
            psi = lambda z: math.log(1 + max(shared["fire_c"], 1e-6) * z)
            h = (
                np.array(
                    [
                        math.copysign(1, d)
                        * psi(abs(d))
                        / psi(max(t, max(shared["fire_threshold"], 1.0)))
                    ]
                )
                if d
                else np.zeros(1)
            )
            for i in range(3):
                h = h @ shared[f"fire_kernel_{i}"] + shared[f"fire_bias_{i}"]
                h = np.maximum(h, 0) if i < 2 else h
            e[s] += h[n]
        elif name == "shaw":
            most = given.get("max_distance", 16)
            e[s] += scale * (q @ p["relative_keys"][clip(-d, most) + most])
        elif name == "transformer_xl":
            distance = sinusoid(d, c.d_model, layout="halves")
            r = distance @ p["relative_kernel"][:, n]
            e[s] += scale * (p["content_bias"][n] @ k[s] + (q + p["position_bias"][n]) @ r)
        elif name == "deberta":
            most = given.get("max_distance", 128)
            vector = shared["relative_embedding"][max(0, min(2 * most - 1, d + most))]
            to, of = vector @ p["relative_key"][:, n], vector @ p["relative_query"][:, n]
            e[s] = (e[s] + scale * (q @ to + k[s] @ of)) / math.sqrt(3)
    return e


def t5_bucket(d, buckets, most, causal):
    """Of a distance key minus query."""
    offset = 0
    if causal:
        d = max(-d, 0)
    else:
        buckets //= 2
        offset, d = (buckets if d > 0 else 0), abs(d)
    exact = buckets // 2
    if d < exact:
        return offset + d
    return offset + min(
        exact + int(math.log(d / exact) / math.log(most / exact) * (buckets - exact)), buckets - 1
    )
