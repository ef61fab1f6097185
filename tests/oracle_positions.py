"""Slow and obvious position schemes: one query, one key and one head at a time."""

import math

import numpy as np


def choose(spec):
    return (
        (spec, {})
        if isinstance(spec, str)
        else (spec["name"], {k: v for k, v in spec.items() if k != "name"})
    )


def sinusoid(t, d, base=1e4, layout="interleaved"):
    out = np.zeros(d)
    for i in range(d // 2):
        angle = t / base ** (2 * i / d)
        pair = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + d // 2)
        out[pair[0]], out[pair[1]] = math.sin(angle), math.cos(angle)
    return out


def pope(options, q, k, distance, bias):
    """Returns sum_c softplus(q_c) softplus(k_c) cos(distance theta^(-c/d) - bias_c)."""
    softplus = lambda x: math.log(1 + math.exp(x))
    theta, d = options.get("theta", 1e4), len(q)
    bias = np.clip(bias, -2 * math.pi, 0)
    return sum(
        softplus(q[c]) * softplus(k[c]) * math.cos(distance * theta ** (-c / d) - bias[c])
        for c in range(d)
    )


def clip(d, limit):
    return int(max(-limit, min(limit, d)))


def rotate(name, options, x, t, length, direction):
    """Returns R_t x; for xPos, also scaled by zeta^t (queries) or zeta^-t (keys)."""
    x, theta = x.copy(), options.get("theta", 1e4)
    d = int(len(x) * options.get("fraction", 1.0))
    scaling, scaling_options = choose(options.get("scaling", "none"))
    original, factor = scaling_options.get("original_length"), scaling_options.get("factor", 1.0)
    magnitude = 1.0
    if scaling == "ntk":
        theta = theta * factor ** (d / (d - 2))
    if scaling == "dynamic":
        theta = theta * (factor * max(length, original) / original - (factor - 1)) ** (d / (d - 2))
    for i in range(d // 2):
        f = theta ** (-2 * i / d)
        if scaling == "linear":
            f = f / factor
        if scaling == "proportional" and i >= math.floor(scaling_options["share"] * d / 2):
            f = 0.0
        if scaling == "longrope":
            is_long, magnitude = length > original, scaling_options["attention_factor"]
            f = f / scaling_options["long_factors" if is_long else "short_factors"][i]
        if scaling == "llama3":
            wavelength, low, high = (
                2 * math.pi / f,
                scaling_options.get("low_frequency_factor", 1.0),
                scaling_options.get("high_frequency_factor", 4.0),
            )
            if wavelength > original / low:
                f = f / factor
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                f = (1 - smooth) * f / factor + smooth * f
        if scaling == "yarn":
            index = lambda turns: (
                d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            )
            low, high = (
                index(scaling_options.get("beta_fast", 32)),
                index(scaling_options.get("beta_slow", 1)),
            )
            if scaling_options.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, d - 1)
            ramp = min(max((i - low) / max(high - low, 1e-3), 0), 1)
            f = f / factor * ramp + f * (1 - ramp)
            magnitude = scaling_options.get("attention_factor") or 0.1 * math.log(factor) + 1
        a, b = (
            (i, i + d // 2) if options.get("layout", "halves") == "halves" else (2 * i, 2 * i + 1)
        )
        zeta = 1.0
        if name == "xpos":
            gamma = options.get("gamma", 0.4)
            zeta = ((2 * i / d + gamma) / (1 + gamma)) ** (
                direction * t / options.get("scale_base", 512.0)
            )
        cos, sin = magnitude * zeta * math.cos(t * f), magnitude * zeta * math.sin(t * f)
        x[a], x[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return x


def add_positions(c, name, options, p, shared, n, e, q, k, t, positions, mask, scale, causal):
    """Returns the logits of one query and head with the position scheme applied."""
    e = e.copy()
    if name == "cope":
        limit, table = options.get("max_positions", 64), p["contextual_positions"]
        gates = np.where(mask, 1 / (1 + np.exp(-e)), 0.0)
        for s in range(len(k)):
            count = min(gates[s:].sum(), limit - 1)
            low, high = math.floor(count), math.ceil(count)
            vector = (1 - (count - low)) * table[low] + (count - low) * table[high]
            e[s] += q @ vector
        return e
    for s, s_position in enumerate(positions):
        d = int(t - s_position)
        if name == "pope":
            e[s] = scale * pope(options, q, k[s], d, p["phase_bias"][n])
        e[s] += distance_bias(name, options, shared, n, d, t, c.num_heads, causal)
        if name == "shaw":
            limit = options.get("max_distance", 16)
            e[s] += scale * (q @ p["relative_keys"][clip(-d, limit) + limit])
        elif name == "transformer_xl":
            distance = sinusoid(d, c.d_model, layout="halves")
            r = distance @ p["relative_kernel"][:, n]
            e[s] += scale * (p["content_bias"][n] @ k[s] + (q + p["position_bias"][n]) @ r)
        elif name == "deberta":
            r_k, r_q = deberta(c, options, p, shared, n, d)
            e[s] = (e[s] + scale * (q @ r_k + k[s] @ r_q)) / math.sqrt(3)
    return e


def deberta(c, options, p, shared, n, d):
    """Returns the key and the query of head n at the distance d = t - s."""
    limit, buckets = options.get("max_distance", 128), options.get("buckets", 0)
    if buckets and abs(d) > buckets // 2:
        m = buckets // 2
        size = math.ceil(math.log(abs(d) / m) / math.log((limit - 1) / m) * (m - 1)) + m
        d = int(math.copysign(size, d))
    half = buckets or limit
    vector = shared["relative_embedding"][max(0, min(2 * half - 1, d + half))]
    if options.get("norm"):
        vector = (vector - vector.mean()) / np.sqrt(vector.var() + c.norm_epsilon)
        vector = vector * shared["relative_norm_gain"] + shared["relative_norm_offset"]
    if not options.get("shared"):
        return vector @ p["relative_key"][:, n], vector @ p["relative_query"][:, n]
    key, query = p["key"], p["query"]
    group = n * key["kernel"].shape[1] // query["kernel"].shape[1]
    r_k = vector @ key["kernel"][:, group] + key["bias"][group]
    return r_k, vector @ query["kernel"][:, n] + query["bias"][n]


NOT_BY_DISTANCE = (
    "none", "learned", "sinusoidal", "rotary", "xpos", "pope", "shaw", "transformer_xl", "deberta",
)  # fmt: skip
"""The schemes that are computed elsewhere, or do nothing."""


def distance_bias(name, options, shared, n, d, t, heads, causal):
    """Returns what head n adds to a logit as a function of the distance d = t - s alone."""
    if name == "alibi":
        power = 2 ** int(math.log2(heads))
        slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        slopes += [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * (heads - power), 2)]
        given = options.get("slopes", "geometric")
        if given == "learned":
            slopes = shared["slopes"]
        elif given != "geometric":
            slopes = list(given) * (heads // len(given))
        return -slopes[n] * abs(d)
    if name == "t5":
        sizes = options.get("num_buckets", 32), options.get("max_distance", 128)
        return shared["relative_bias"][t5_bucket(-d, *sizes, causal), n]
    if name == "kerple":
        r, a = (max(shared[f"kernel_{x}"][n], 0.01) for x in "ra")
        return -r * math.log(1 + a * abs(d))
    if name == "sandwich":
        width, first = options.get("width", 128), options.get("first_index", 0)
        indices = range(first, first + width // 2)
        total = sum(math.cos(abs(d) / 1e4 ** (2 * i / width)) for i in indices)
        return (total - width / 2) / (8 * (n + 1) / heads)
    if name == "fire":
        psi = lambda z: math.log(1 + max(shared["fire_c"], 1e-6) * z)
        h = np.zeros(1)
        if d:
            longest = max(t, max(shared["fire_threshold"], 1.0))
            h = np.array([math.copysign(1, d) * psi(abs(d)) / psi(longest)])
        for i in range(3):
            h = h @ shared[f"fire_kernel_{i}"] + shared[f"fire_bias_{i}"]
            h = np.maximum(h, 0) if i < 2 else h
        return h[n]
    if name not in NOT_BY_DISTANCE:
        raise NotImplementedError(f"write {name!r} here, in tests/oracle_positions.py")
    return 0.0


def t5_bucket(d, buckets, max_distance, causal):
    """Returns the bucket of the distance d = s - t (key minus query)."""
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
        exact + int(math.log(d / exact) / math.log(max_distance / exact) * (buckets - exact)),
        buckets - 1,
    )
