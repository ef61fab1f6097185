"""Residual connections other than the one formula, for the oracle (oracle.py), one token at a time.

Each is a class with the streams of one token as its state. `norm(name, x)` applies the sublayer's
norm of that name, `p` holds the sublayer's parameters, `f` is the sublayer without its norms, and
`i` and `j` number the layer and the sublayer in it. `shape` is (layers, sublayers of a layer).
"""

import math

import numpy as np


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class ResiDual:
    def __init__(self, x, options, shape):
        self.x, self.dual = x, x

    def apply(self, f, norm, p, i, j):
        o = f(self.x)
        self.x, self.dual = norm("out_norm", self.x + o), self.dual + o

    def end(self, norm, p):
        return self.x + norm("final_norm", self.dual)


class SiameseNorm:
    def __init__(self, x, options, shape):
        self.x, self.y = x, x

    def apply(self, f, norm, p, i, j):
        o = f(norm("in_norm", self.x + norm("stream_norm", self.y)))
        self.x = norm("out_norm", self.x + o / math.sqrt(2 * (i + 1)))
        self.y = self.y + o

    def end(self, norm, p):
        return self.x + norm("final_norm", self.y)


class BottomToTop:
    def __init__(self, x, options, shape):
        self.x, self.last = x, shape[1] - 1

    def apply(self, f, norm, p, i, j):
        if j == 0:
            self.bottom = self.x
        y = self.x + f(self.x)
        if j == self.last > 0:
            y = y + self.bottom
        self.x = norm("out_norm", y)

    def end(self, norm, p):
        return self.x


class Keel(BottomToTop):
    def __init__(self, x, options, shape):
        self.x, self.a = x, shape[0] * shape[1]

    def apply(self, f, norm, p, i, j):
        o = f(norm("in_norm", self.x))
        y = self.x + o if i == 0 else self.a * self.x + o
        self.x = y if i == j == 0 else norm("out_norm", y)


class MixLN:
    def __init__(self, x, options, shape):
        self.x, self.post = x, int(options.get("share", 0.25) * shape[0])

    def apply(self, f, norm, p, i, j):
        if i < self.post:
            self.x = norm("norm", self.x + f(self.x))
        else:
            self.x = self.x + f(norm("norm", self.x))

    def end(self, norm, p):
        return norm("final_norm", self.x)


class HybridNorm(MixLN):
    def __init__(self, x, options, shape):
        self.x, self.last, self.pre_first = x, shape[1] - 1, options.get("pre_first", True)

    def apply(self, f, norm, p, i, j):
        if self.pre_first and i == 0:
            self.x = self.x + f(norm("norm", self.x))
        elif j < self.last:
            self.x = self.x + f(self.x)
        else:
            z = norm("norm", self.x)
            self.x = z + f(z)


class HyperConnections:
    def __init__(self, x, options, shape):
        self.n = options.get("streams", 4)
        self.streams = np.stack([x] * self.n)  # [n, T, D]

    def apply(self, f, norm, p, i, j):
        n, streams = self.n, self.streams
        tokens = range(streams.shape[1])
        read, keep, write = map(
            np.stack, zip(*(self.weights(norm, p, t) for t in tokens), strict=True)
        )
        h = np.stack([sum(read[t, m] * streams[m, t] for m in range(n)) for t in tokens])
        o = f(norm("in_norm", h))
        self.streams = np.stack(
            [
                [sum(keep[t, k, m] * streams[m, t] for m in range(n)) + write[t, k] * o[t]
                 for t in tokens]
                for k in range(n)
            ]
        )  # fmt: skip

    def weights(self, norm, p, t):
        x, n = norm("stream_norm", self.streams[:, t]), self.n
        read = p["mix_scale"] * np.tanh(x @ p["read_kernel"][:, 0]) + p["read"]
        mix = p["mix_scale"] * np.tanh(x @ p["keep_kernel"]) + p["keep"].reshape(n, n)
        write = p["write_scale"] * np.tanh(x @ p["write_kernel"][:, 0]) + p["write"]
        return read, mix.T, write

    def end(self, norm, p):
        return norm("final_norm", self.streams.sum(0))


class ManifoldHyperConnections(HyperConnections):
    def weights(self, norm, p, t):
        x, n = self.streams[:, t].reshape(-1), self.n
        x = x / np.sqrt((x**2).mean() + 1e-6)
        a, b = p["scale"], p["bias"]
        read = sigmoid(a[0] * x @ p["phi"][:, :n] + b[:n])
        write = 2 * sigmoid(a[1] * x @ p["phi"][:, n : 2 * n] + b[n : 2 * n])
        keep = np.exp((a[2] * x @ p["phi"][:, 2 * n :] + b[2 * n :]).reshape(n, n))
        for _ in range(20):
            keep = keep / keep.sum(1, keepdims=True)
            keep = keep / keep.sum(0, keepdims=True)
        return read, keep, write


class AttentionResiduals:
    def __init__(self, x, options, shape):
        self.embedding, self.block, self.outputs = x, options.get("block", 1), []

    def aggregate(self, name, norm, p):
        """Attention over the embeddings and the sums of blocks, the last of them incomplete."""
        starts = range(0, len(self.outputs), self.block)
        blocks = [sum(self.outputs[k : k + self.block]) for k in starts]
        sources = [self.embedding, *blocks]
        keys = [norm(f"{name}_norm", v) for v in sources]
        weights = [
            softmax(np.array([key[t] @ p[f"{name}_query"] for key in keys]))
            for t in range(len(self.embedding))
        ]
        return np.stack(
            [
                sum(w * v[t] for w, v in zip(ws, sources, strict=True))
                for t, ws in enumerate(weights)
            ]
        )

    def apply(self, f, norm, p, i, j):
        self.outputs.append(f(norm("in_norm", self.aggregate("source", norm, p))))

    def end(self, norm, p):
        return norm("final_norm", self.aggregate("last", norm, p))


TOPOLOGIES = {
    "resi_dual": ResiDual,
    "siamese_norm": SiameseNorm,
    "b2t": BottomToTop,
    "keel": Keel,
    "mix_ln": MixLN,
    "hybrid_norm": HybridNorm,
    "hyper_connections": HyperConnections,
    "mhc": ManifoldHyperConnections,
    "attention_residuals": AttentionResiduals,
}
