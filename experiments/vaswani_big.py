"""The big Transformer of Vaswani et al. (2017) on WMT 2014 English-German, with all of its hyperparameters.

What does three times the parameters buy over experiments/vaswani_base.py, by the paper's recipe?

    python -m transformer train    --config=experiments/vaswani_big.py --workdir=runs/vaswani_big
    python -m transformer evaluate --workdir=runs/vaswani_big

Text, and where the paper leaves a choice: as in vaswani_base.py.
Hardware  an accelerator: 213 M parameters; the paper took 1.0 s a step on 8 P100, 3.5 days
Expected  the paper reports 28.4 BLEU (tokenised, compound-split) after 300,000 steps; En-Fr takes dropout 0.1: --config.model.dropout=0.1
Seen      not run yet: no accelerator was at hand. It builds and shards in the tests.
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
        average_checkpoints=20,  # section 6.1: the last 20, written every 10 minutes, which were 600 steps
        keep_checkpoints=20,
        checkpoint_every=600,
    )
    return config
