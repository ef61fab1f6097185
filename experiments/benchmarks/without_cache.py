"""Compares greedy decoding with a cache to decoding that computes the whole prefix at each step.

    python experiments/benchmarks/without_cache.py [--rounds=3]

Without a cache, step t computes all t tokens: n tokens cost n^2 / 2 products with the weights, and
n^3 / 3 with the keys. With a cache, they cost n and n^2 / 2. A random decoder (6 layers, d_model
256) continues 4 prompts of 16 tokens in float32. Without a cache, prefixes are padded to multiples
of 32 tokens, because each length is a program of its own. Prints for each number of new tokens the
time with and without the cache, the median, minimum and maximum of their ratio over the rounds, and
the share of tokens that are equal.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import transformer

PROMPTS, LENGTH, BLOCK = 4, 16, 32
NEW = (16, 48, 112, 240)  # with the prompt, 32, 64, 128 and 256 tokens
EOS = 0  # never generated


def with_cache(model, params, prompt, new):
    """Returns a function that decodes with the cache."""
    rest = np.full(PROMPTS, new), jax.random.split(jax.random.key(0), PROMPTS)  # limits, keys
    options = {"max_new": new, "eos_id": EOS, "suppress_tokens": (EOS,)}
    decode = jax.jit(lambda params: transformer.sample(model, params, prompt, *rest, **options))
    return lambda: np.asarray(decode(params))


def without_cache(model, params, prompt, new):
    """Returns a function that decodes with one forward pass over the prefix for each token."""

    @jax.jit
    def next_token(params, tokens, count):
        logits = model.apply(params, tokens)
        last = jax.lax.dynamic_index_in_dim(logits, count - 1, axis=1, keepdims=False)
        return jnp.argmax(last.at[:, EOS].set(-jnp.inf), axis=-1).astype(tokens.dtype)

    def decode():
        tokens = np.pad(prompt, ((0, 0), (0, new)), constant_values=1)
        for count in range(LENGTH, LENGTH + new):
            padded = -(-count // BLOCK) * BLOCK  # later tokens do not affect a causal decoder
            tokens[:, count] = next_token(params, tokens[:, :padded], count)
        return tokens[:, LENGTH:]

    return decode


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    config = transformer.ModelConfig(
        family="decoder",
        vocab_size=8192,
        num_decoder_layers=6,
        d_model=256,
        num_heads=4,
        max_length=256,
        position="rotary",
    )
    model = transformer.build_model(config)
    prompt = np.random.default_rng(0).integers(1, 8192, (PROMPTS, LENGTH)).astype(np.int32)
    params = model.init(jax.random.key(0), prompt)
    print("new tokens  with cache  without  ratio (minimum to maximum)  equal tokens")
    for new in NEW:
        sides = [side(model, params, prompt, new) for side in (with_cache, without_cache)]
        equal = np.mean(sides[0]() == sides[1]())  # also compiles both
        seconds = []
        for _ in range(rounds):
            starts = []
            for side in sides:
                start = time.perf_counter()
                side()
                starts.append(time.perf_counter() - start)
            seconds.append(starts)
        cached, whole = (statistics.median(column) for column in zip(*seconds, strict=True))
        ratios = [b / a for a, b in seconds]
        spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
        print(
            f"{new:10}  {cached:8.2f} s  {whole:5.2f} s  "
            f"{statistics.median(ratios):5.1f} ({spread:>12})        {equal:12.1%}"
        )


if __name__ == "__main__":
    main()
