"""The big Transformer of Vaswani et al. (2017), with all hyperparameters: WMT 2014 English-German.

How much better is it than the model of vaswani_base.py, with three times as many parameters?

    python -m transformer train    --config=experiments/vaswani_big.py --workdir=runs/vaswani_big
    python -m transformer evaluate --workdir=runs/vaswani_big

The data, and the choices that the paper leaves open, are those of vaswani_base.py.

Hardware  an accelerator: 214 M parameters (the paper: 213 M); the paper took 1.0 s per step on 8
          P100, 3.5 days
Expected  the paper reports 28.4 BLEU (tokenized, compound-split) after 300,000 steps; for
          English-French, it uses dropout 0.1: --config.model.dropout=0.1
Measured  not run yet, for lack of an accelerator. The tests build and shard the model.
"""

import importlib.util
from pathlib import Path

BASE = Path(__file__).with_name("vaswani_base.py")


def get_config():
    spec = importlib.util.spec_from_file_location("vaswani_base", BASE)
    base = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(base)
    config = base.get_config()
    config.model.update(  # table 3, last row
        d_model=1024,
        d_ff=4096,
        num_heads=16,
        dropout=0.3,
    )
    config.optimizer.learning_rate = (1024 * 4000) ** -0.5
    config.train.update(
        steps=300_000,
        # Section 6.1: the last 20 checkpoints, one every 10 minutes, that is every 600 steps.
        average_checkpoints=20,
        keep_checkpoints=20,
        checkpoint_every=600,
    )
    return config
