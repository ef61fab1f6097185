r"""Measures training throughput against the same model in PyTorch (Hugging Face), on this CPU.

    pip install torch transformers        (CPU PyTorch 2.13 was used)
    python experiments/benchmarks/throughput.py [encoder_decoder] [decoder] [--rounds=8] \
        [--dropout=0.1] [--same-allocator] [--plain]

JAX and PyTorch run in separate processes, which take steps in turn. They never compute at the same
time, and a drift of the machine's speed affects both. Prints the median seconds per step, the
ratio of times over the rounds (median, min, max), and the share of this machine's matrix-multiply
rate (the best of a few products of float32 matrices) that the step reaches, counting 6 FLOPs per
parameter and token plus attention. `--same-allocator` runs PyTorch with the allocator settings that
transformer.parallel.host applies for JAX. `--plain` trains with a loop of one's own over
`model.apply`, with scanned layers, instead of the step of `python -m transformer train`.
"""

import functools
import statistics
import sys
import time

from turns import SAME_ALLOCATOR, in_turn, serve

CASES = {
    # name: the tokens per step, and the sizes of both models
    "encoder_decoder": {
        "layers": 6,
        "d_model": 512,
        "d_ff": 2048,
        "heads": 8,
        "vocab": 16384,
        "rows": 64,
        "length": 32,
    },
    "decoder": {
        "layers": 6,
        "d_model": 256,
        "d_ff": 1024,
        "heads": 4,
        "vocab": 8192,
        "rows": 16,
        "length": 256,
    },
}


def experiment(case: str, dropout: float, scan_layers: bool):
    """Returns the experiment with the same model and batch shape as in PyTorch."""
    from transformer.config import Experiment
    from transformer.mapping import from_mapping

    c = CASES[case]
    is_encoder_decoder = case == "encoder_decoder"
    model = {
        "family": case,
        "vocab_size": c["vocab"],
        "d_model": c["d_model"],
        "d_ff": c["d_ff"],
        "num_heads": c["heads"],
        "num_encoder_layers": c["layers"],
        "num_decoder_layers": c["layers"],
        "max_length": c["length"],
        "dropout": dropout,
        "scan_layers": scan_layers,
    }
    if is_encoder_decoder:
        model |= {
            "position": "sinusoidal",
            "norm_placement": "post",
            "activation": "relu",
            "embedding_scale": True,
            "logit_bias": True,
        }
    else:
        model |= {
            "position": "learned",
            "norm_placement": "pre",
            "activation": "gelu_tanh",
            "attention_dropout": dropout,
        }
    return from_mapping(
        Experiment,
        {
            "model": model,
            "data": {
                "corpus": "pydoc",
                "objective": "seq2seq" if is_encoder_decoder else "causal_lm",
                "length": c["length"],
                "batch_size": c["rows"],
            },
            "optimizer": {"learning_rate": 1e-4, "schedule": "constant", "warmup_steps": 0},
        },
    )


def jax_batch(case: str) -> dict:
    """Returns a batch of full sequences of random tokens."""
    import numpy as np

    c = CASES[case]
    rng, shape = np.random.default_rng(0), (c["rows"], c["length"])
    ids = lambda: rng.integers(3, c["vocab"], shape).astype(np.int32)
    layout = {
        "segments": np.ones(shape, np.int32),
        "positions": np.tile(np.arange(c["length"], dtype=np.int32), (c["rows"], 1)),
    }
    batch = {"inputs": ids(), "targets": ids(), "weights": np.ones(shape, np.float32), **layout}
    if case == "encoder_decoder":
        batch |= {"source": ids()} | {f"source_{k}": v for k, v in layout.items()}
    return batch


def plain_side(case: str, dropout: float) -> None:
    """Serves training steps of a loop over the Python API, as in docs/tour.ipynb."""
    import transformer

    model = transformer.build_model(experiment(case, dropout, scan_layers=True).model)
    import jax
    import jax.numpy as jnp
    import optax

    batch, optimizer = jax_batch(case), optax.adamw(1e-4)
    inputs = [batch[name] for name in ("source", "inputs") if name in batch]
    params = jax.jit(model.init)(jax.random.key(0), *inputs)
    opt_state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, key):
        def loss(params):
            logits = model.apply(params, *inputs, deterministic=not dropout, rngs={"dropout": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return jnp.mean(losses)

        updates, new_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), new_state

    def once():
        nonlocal params, opt_state
        params, opt_state = step(params, opt_state, jax.random.key(0))
        jax.block_until_ready(params)

    parameters = sum(x.size for x in jax.tree.leaves(params))
    serve(once, {"parameters": parameters, "matmul_flops": matmul_rate(jax, jnp)})


def jax_side(case: str, dropout: float) -> None:
    """Serves training steps of this package."""
    import jax
    import jax.numpy as jnp

    from transformer.model.network import build_model
    from transformer.parallel.mesh import make_mesh, use
    from transformer.training.optimizer import build_optimizer
    from transformer.training.state import abstract_state, init_state
    from transformer.training.step import make_train_step

    config, batch = experiment(case, dropout, scan_layers=False), jax_batch(case)
    with use(make_mesh(config.mesh)) as mesh:
        module, optimizer = (
            build_model(config.model),
            build_optimizer(config.optimizer, 100, config.model),
        )
        _, sharding = abstract_state(config, module, optimizer, mesh)
        state = init_state(config, module, optimizer, sharding)
        parameters = sum(x.size for x in jax.tree.leaves(state.params))
        step = make_train_step(config, module, optimizer, mesh, sharding)

        def once():
            nonlocal state
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))

        serve(once, {"parameters": parameters, "matmul_flops": matmul_rate(jax, jnp)})


def matmul_rate(jax, jnp) -> float:
    """Returns the best rate of a few float32 products, in FLOP/s."""
    best = 0.0
    for m, k, n in ((2048, 512, 2048), (2048, 2048, 2048), (4096, 1024, 1024), (4096, 256, 1024)):
        a, b, f = jnp.ones((m, k)), jnp.ones((k, n)), jax.jit(jnp.matmul)
        f(a, b).block_until_ready()
        for _ in range(10):
            start = time.perf_counter()
            f(a, b).block_until_ready()
            best = max(best, 2 * m * k * n / (time.perf_counter() - start))
    return best


def torch_side(case: str, dropout: float) -> None:
    """Serves training steps of the same model in PyTorch."""
    import torch
    import transformers

    c = CASES[case]
    torch.manual_seed(0)
    ids = lambda: torch.randint(3, c["vocab"], (c["rows"], c["length"]))
    if case == "encoder_decoder":
        model = transformers.MarianMTModel(
            transformers.MarianConfig(
                vocab_size=c["vocab"],
                d_model=c["d_model"],
                encoder_layers=c["layers"],
                decoder_layers=c["layers"],
                encoder_ffn_dim=c["d_ff"],
                decoder_ffn_dim=c["d_ff"],
                encoder_attention_heads=c["heads"],
                decoder_attention_heads=c["heads"],
                max_position_embeddings=c["length"],
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
                scale_embedding=True,
                activation_function="relu",
                dropout=dropout,
            )
        )
        inputs = {"input_ids": ids(), "labels": ids()}
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=c["vocab"],
                n_positions=c["length"],
                n_embd=c["d_model"],
                n_layer=c["layers"],
                n_head=c["heads"],
                embd_pdrop=dropout,
                resid_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=1,
                eos_token_id=2,
            )
        )
        tokens = ids()
        inputs = {"input_ids": tokens, "labels": tokens}
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def once():
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()

    parameters = sum(p.numel() for p in model.parameters())
    serve(once, {"parameters": parameters, "threads": torch.get_num_threads()})


def compare(case: str, rounds: int, dropout: str, plain: bool, same_allocator: bool) -> None:
    def side(name: str) -> list[str]:
        return [__file__, f"--side={name}", f"--dropout={dropout}", case]

    allocator = SAME_ALLOCATOR if same_allocator else {}
    sides = {
        "jax": (side("plain" if plain else "jax"), {"JAX_PLATFORMS": "cpu"}),
        "torch": (side("torch"), allocator | {"TRANSFORMERS_VERBOSITY": "error"}),
    }
    report(case, *in_turn(sides, rounds))


def report(case: str, facts: dict[str, dict], times: dict[str, list[float]]) -> None:
    """Prints the medians and the ratios of the rounds."""
    c = CASES[case]
    ratios = [t / j for j, t in zip(times["jax"], times["torch"], strict=True)]
    ours, theirs = (statistics.median(times[side]) for side in ("jax", "torch"))
    tokens, attentions = (
        c["rows"] * c["length"],
        (3 if case == "encoder_decoder" else 1) * c["layers"],
    )
    flops = (
        6 * facts["jax"]["parameters"] * tokens
        + 12 * attentions * c["length"] * c["d_model"] * tokens
    )
    print(
        f"{case}: {c['layers']} layers, d_model {c['d_model']}, "
        f"{c['rows']} x {c['length']} tokens, vocabulary {c['vocab']:,}"
    )
    print(
        f"  parameters     ours {facts['jax']['parameters']:,}, "
        f"PyTorch {facts['torch']['parameters']:,}; PyTorch on {facts['torch']['threads']} threads"
    )
    print(f"  seconds/step   ours {ours:.3f}, PyTorch {theirs:.3f}")
    print(
        f"  ratio          {statistics.median(ratios):.2f} "
        f"(rounds: {min(ratios):.2f} to {max(ratios):.2f})"
    )
    print(f"  tokens/s       {tokens / ours:,.0f}")
    print(
        "  share of this machine's matrix-multiply rate "
        f"({facts['jax']['matmul_flops'] / 1e9:.0f} GFLOP/s): "
        f"{flops / ours / facts['jax']['matmul_flops']:.0%}"
    )


def main() -> None:
    cases = [a for a in sys.argv[1:] if not a.startswith("-")] or list(CASES)
    options = dict(
        a.removeprefix("--").partition("=")[::2] for a in sys.argv[1:] if a.startswith("-")
    )
    dropout = options.get("dropout", "0.1")
    if "side" in options:
        sides = {"jax": jax_side, "plain": plain_side, "torch": torch_side}
        sides[options["side"]](cases[0], float(dropout))
        return
    for case in cases:
        compare(
            case,
            int(options.get("rounds", 8)),
            dropout,
            "plain" in options,
            "same-allocator" in options,
        )


if __name__ == "__main__":
    main()
