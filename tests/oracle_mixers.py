"""Slow and obvious token mixers in NumPy and float64, written from the papers' equations.

They compute one sequence, one head and one token at a time. They share no code with the package:
they read the fields of a config and the parameters of one sublayer.
"""

import numpy as np


def mla(c, p, x, rank, rope, rotate=lambda vector, t: vector, window=0):
    """Causal multi-head latent attention (DeepSeek-V2, sec. 2.1) on one sequence x [T, D].

    `rotate(vector, position)` rotates a vector of size `rope`. Returns [T, D].
    """
    q = rms(c, p["query_norm"], x @ p["query_down"]["kernel"]) if "query_down" in p else x
    q = np.einsum("td,dnh->tnh", q, p["query"]["kernel"])
    down = x @ p["key_value_down"]["kernel"]
    latent, shared = rms(c, p["key_value_norm"], down[:, :rank]), down[:, rank:]
    out = np.zeros((len(x), c.num_heads, c.d_value or c.head_size))
    for n in range(c.num_heads):
        keys = [
            np.concatenate([latent[s] @ p["key_up"]["kernel"][:, n], rotate(shared[s], s)])
            for s in range(len(x))
        ]
        values = latent @ p["value_up"]["kernel"][:, n]
        for t in range(len(x)):
            query = np.concatenate([q[t, n, : c.head_size], rotate(q[t, n, c.head_size :], t)])
            first = max(t - window + 1, 0) if window else 0
            logits = np.array([query @ keys[s] for s in range(first, t + 1)])
            logits /= np.sqrt(c.head_size + rope)
            weights = np.exp(logits - logits.max())
            out[t, n] = weights / weights.sum() @ values[first : t + 1]
    return np.einsum("tnv,nvd->td", out, p["out"]["kernel"])


def differential(c, p, x, layer):
    """Causal differential attention (arXiv:2410.05258, eqs. 1 to 3) on one sequence x [T, D]."""
    start = 0.8 - 0.6 * np.exp(-0.3 * layer)
    dots = [p[f"lambda_q{i}"] @ p[f"lambda_k{i}"] for i in (1, 2)]
    factor, per_key = np.exp(dots[0]) - np.exp(dots[1]) + start, c.num_heads // c.kv_heads
    causal, out = np.tril(np.ones((len(x), len(x)), bool)), 0.0
    for group in range(c.kv_heads // 2):
        values = x @ p["value"]["kernel"][:, group]
        for n in range(per_key):
            maps = []
            for head in (2 * group, 2 * group + 1):
                query = x @ p["query"]["kernel"][:, head * per_key + n]
                key = x @ p["key"]["kernel"][:, head]
                e = np.where(causal, np.exp(query @ key.T / np.sqrt(c.head_size)), 0.0)
                maps.append(e / e.sum(-1, keepdims=True))
            read = rms(c, p["head_norm"], (maps[0] - factor * maps[1]) @ values)
            out = out + (1 - start) * read @ p["out"]["kernel"][group * per_key + n]
    return out


def forgetting(c, p, x, segments):
    """Forgetting attention (arXiv:2503.02130) on one sequence x [T, D], gate by gate.

    `segments` are the documents of the tokens; 0 is padding. Returns [T, D].
    """
    out = np.zeros_like(x, np.float64)
    gates = sigmoid(x @ p["forget"]["kernel"] + p["forget"]["bias"])
    for n in range(c.num_heads):
        query, key, value = (x @ p[name]["kernel"][:, n] for name in ("query", "key", "value"))
        for t in np.flatnonzero(segments):
            seen = [s for s in range(t + 1) if segments[s] == segments[t]]
            logits = np.array(
                [
                    query[t] @ key[s] / np.sqrt(c.head_size) + np.log(gates[s + 1 : t + 1, n]).sum()
                    for s in seen
                ]
            )
            weights = np.exp(logits - logits.max())
            out[t] += weights / weights.sum() @ value[seen] @ p["out"]["kernel"][n]
    return out


def gated_delta(c, p, x, segments, width=4, twice=False):
    """Gated DeltaNet (arXiv:2412.06464, eq. 10) on one sequence x [T, D].

    `segments` are the documents of the tokens; 0 is padding. Returns [T, D].
    """
    n_heads, size = c.num_heads, c.head_size
    kinds = ("query", "key", "value")
    raw = np.concatenate(
        [np.einsum("td,dnf->tnf", x, p[kind]["kernel"]) for kind in kinds], axis=-1
    )
    out = np.zeros((len(x), n_heads, c.d_value or size))
    state, previous = None, 0
    for t, segment in enumerate(segments):
        if not segment:
            continue
        if segment != previous:
            state, previous = np.zeros((n_heads, size, out.shape[-1])), segment
        mixed = sum(
            p["convolution"][i] * raw[t - i]
            for i in range(width)
            if t - i >= 0 and segments[t - i] == segment
        )
        mixed = mixed * sigmoid(mixed)
        step = np.log1p(np.exp(x[t] @ p["decay"]["kernel"] + p["dt"]))
        a = np.exp(-np.exp(p["log_rate"]) * step)
        b = sigmoid(x[t] @ p["write"]["kernel"]) * (2 if twice else 1)
        gate = np.einsum("d,dnv->nv", x[t], p["gate"]["kernel"])
        for n in range(n_heads):
            q, k, v = np.split(mixed[n], [size, 2 * size])
            q = q / np.sqrt(q @ q + 1e-6) / np.sqrt(size)
            k = k / np.sqrt(k @ k + 1e-6)
            decayed = a[n] * state[n]
            state[n] = decayed + np.outer(k, b[n] * (v - decayed.T @ k))
            read = state[n].T @ q
            read = read / np.sqrt((read**2).mean() + c.norm_epsilon) * p["norm"]["gain"]
            out[t, n] = read * gate[n] * sigmoid(gate[n])
    return np.einsum("tnv,nvd->td", out, p["out"]["kernel"])


def lstm(p, x, segments, reverse=False, read=None):
    """An LSTM (Gers et al. 2000) on one sequence x [T, D]; 1 is added to the forget gate.

    `segments` are the documents of the tokens; 0 is padding. `read(h, document)` returns the
    context of a step. Returns (h [T, G], contexts [T, D]); without `read`, contexts are 0.
    """
    units = p["hidden"]["kernel"].shape[0]
    out, contexts = np.zeros((len(x), units)), np.zeros_like(x)
    h, c, previous = np.zeros(units), np.zeros(units), None
    for t in range(len(x))[:: -1 if reverse else 1]:
        if not segments[t]:
            continue
        if segments[t] != previous:
            h, c, previous = np.zeros(units), np.zeros(units), segments[t]
        z = np.einsum("d,dfg->fg", x[t], p["input"]["kernel"]) + p["input"]["bias"]
        z += np.einsum("g,gfh->fh", h, p["hidden"]["kernel"])
        if read is not None:
            contexts[t] = read(h, segments[t])
            z += np.einsum("d,dfg->fg", contexts[t], p["context"]["kernel"])
        i, f, o, g = z
        c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        out[t] = h
    return out, contexts


def bidirectional_lstm(p, x, segments):
    """The bidirectional LSTM layer of the encoder."""
    outputs = [
        lstm(p[direction], x, segments, direction == "backward")[0]
        for direction in ("forward", "backward")
    ]
    return np.concatenate(outputs, axis=-1)


def attentive_lstm(p, x, segments, source, source_segments, last=False):
    """An LSTM that attends to a source [S, D] before each step (Bahdanau et al. 2015, app. A.2).

    With `last`, it reads only the last state of the source.
    """

    def read(h, document):
        source_steps = np.flatnonzero(np.asarray(source_segments) == document)
        if last:
            return source[source_steps[-1]]
        e = [
            np.tanh(h @ p["query"]["kernel"] + source[j] @ p["keys"]["kernel"])
            @ p["score"]["kernel"][:, 0]
            for j in source_steps
        ]
        a = np.exp(np.array(e) - max(e))
        return a / a.sum() @ source[source_steps]

    h, contexts = lstm(p["forward"], x, segments, read=read)
    return np.tanh(np.concatenate([h, contexts, x], -1) @ p["out"]["kernel"] + p["out"]["bias"])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(c, p, x):
    """RMSNorm over the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_epsilon) * p["gain"]
