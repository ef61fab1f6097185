r"""Can an encoder extract the answer to a question from a story, and does it need positions?

Weston et al. (2015), "Towards AI-Complete Question Answering: A Set of Prerequisite Toy Tasks"
(bAbI), task 1: the answer to "where is mary ?" is the place that she moved to last. The answer is a
span of one or two words, whose first and last word the model predicts, as in Devlin et al. (2019),
sec. 4.2. Without positions, an encoder reads a bag of words. It knows neither who moved where nor
which move was the last. The first command writes the stories:

    python experiments/findings/weston_2015.py
    python -m transformer sweep --config=experiments/findings/weston_2015.py \
        --workdir=runs/weston_2015
    python -m transformer compare runs/weston_2015

At a larger scale (stories of up to 48 facts; TPU v5e-4):
--config=experiments/findings/weston_2015.py:large

Hardware  two CPU cores, 15 runs, about 95 minutes on a busy machine

Measured (two cores of an AMD EPYC; three seeds; share of answers whose first and last word are
both right, with its 95 % interval; paired difference from rotary):

    rotary        0.997 [0.993, 1.000]
    t5            0.90  [0.69,  1.00]     -0.10  [-0.30,  +0.10]
    learned       0.46  [0.28,  0.64]     -0.54  [-0.72,  -0.36]
    sinusoidal    0.426 [0.414, 0.438]    -0.571 [-0.586, -0.557]
    none          0.184 [0.138, 0.230]    -0.813 [-0.855, -0.771]

An encoder extracts nearly every answer with rotary positions, and most with T5's bias. Both tell it
how far apart two words are. With learned and sinusoidal positions, which are added to the
embeddings, it finds fewer than half within 1,500 steps. Without positions, it is no better than
choosing one of the story's moves at random, which is right for 0.245 of the answers.
"""

import random
import sys
from pathlib import Path

import ml_collections

from transformer import Sweep, vary

ARGUMENTS = ("small", "large")
FACTS = {"small": (2, 8), "large": (8, 48)}
STORIES = {"train": 20_000, "valid": 1000, "test": 2000}
PEOPLE = ("mary", "john", "sandra", "daniel")
VERBS = ("moved", "went", "travelled", "journeyed")
PLACES = ("hallway", "back garden", "office", "dining room", "kitchen", "wine cellar")


def story(facts: int, rng: random.Random) -> tuple[str, str]:
    """Returns the words of a question and of a story, and their tags."""
    moves = [(rng.choice(PEOPLE), rng.choice(VERBS), rng.choice(PLACES)) for _ in range(facts)]
    asked = rng.choice(moves)[0]
    last = max(n for n, (person, *_) in enumerate(moves) if person == asked)
    words = ["where", "is", asked, "?"]
    tags = ["-"] * len(words)
    for n, (person, verb, place) in enumerate(moves):
        words += [person, verb, "to", "the", *place.split(), "."]
        tag = "answer" if n == last else "-"
        tags += ["-"] * 4 + [tag] * len(place.split()) + ["-"]
    return " ".join(words), " ".join(tags)


def write(scale: str) -> None:
    """Writes the stories of a scale. No story is in two splits."""
    rng, seen = random.Random(0), set()
    for part, count in STORIES.items():
        file = Path(f"data/weston_2015/{scale}/{part}.tsv")
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        while len(lines) < count:
            text, tags = story(rng.randint(*FACTS[scale]), rng)
            if text not in seen:
                lines.append(f"{text}\t{tags}\n")
            seen.add(text)
        file.write_text("".join(lines))


def get_config(scale="small"):
    config = ml_collections.ConfigDict()
    length = 8 + 8 * FACTS[scale][1]
    config.model = dict(
        family="encoder",
        vocab_size=64,
        num_encoder_layers=4,
        d_model=64,
        d_ff=256,
        num_heads=4,
        max_length=length,
        position="rotary",
        norm_placement="pre",
        num_labels=2,
        pooling="span",
        lm_head=False,
        attention_backend="reference",
    )
    config.data = dict(
        **{part: f"data/weston_2015/{scale}/{part}.tsv" for part in STORIES},
        format="tsv",
        objective="extractive_qa",
        length=length,
        batch_size=32,
        packing=False,
        tokenizer=dict(kind="word", byte_fallback=False),
    )
    config.optimizer = dict(
        name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=100, weight_decay=0.01
    )
    config.train = dict(steps=1500, log_every=50, eval_every=500, tensorboard=False)
    if scale == "large":
        config.model.update(
            num_encoder_layers=8, d_model=512, d_ff=2048, num_heads=8, attention_backend="auto"
        )
        config.data.batch_size = 256
        config.optimizer.learning_rate = 3e-4
        config.train.steps = 10_000
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    return Sweep(
        vary("model.position", "rotary", "t5", "learned", "sinusoidal", "none"),
        question="Which position schemes find the last place in a story?",
        metric="test/accuracy",
        seeds=3,
    )


if __name__ == "__main__":
    for scale in sys.argv[1:] or ARGUMENTS:
        write(scale)
