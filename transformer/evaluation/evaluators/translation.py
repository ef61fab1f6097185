"""BLEU and sample outputs during training."""

from transformer.checks import at_least
from transformer.decoding.generate import Generator
from transformer.evaluation.evaluators.base import EVALUATORS, Evaluator, Metrics, Snapshot, Subject
from transformer.evaluation.translation import group, score
from transformer.output import count


@EVALUATORS.register("translation")
class Translation(Evaluator):
    """BLEU, chrF and sample translations of the first validation sentences, during training.

    Uses the decoding settings of `config.decoding`. It does nothing in `evaluate`, which always
    translates the whole split.
    """

    in_training = True

    sentences: int = 100  # validation sentences to translate
    samples: int = 3  # translations to record as text

    def __post_init__(self):
        at_least("train.evaluators", self, 1, "sentences")
        at_least("train.evaluators", self, 0, "samples")

    def why_not(self, task):
        if not task.objective.has_pairs:
            return "requires translations of a source; set data.objective = 'seq2seq'"

    def measured_text(self, task):
        return count(self.sentences, "sentence")

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields translation/bleu, translation/chrf and texts translation/sample/N."""
        if snapshot.translations is not None:
            return
        if self not in subject.programs:
            tokenizer = subject.data.tokenizer
            subject.programs[self] = Generator(subject.config, snapshot.params, tokenizer)
        generate = subject.programs[self]
        generate.params = snapshot.params
        sources, references = group(subject.data.store.examples(subject.part))
        sources, references = sources[: self.sentences], references[: self.sentences]
        hypotheses = generate(sources)
        scores, _ = score(hypotheses, references)
        yield "translation/bleu", scores["bleu"]
        yield "translation/chrf", scores["chrf"]
        shown = zip(sources, hypotheses, references, strict=True)
        for n, (source, hypothesis, accepted) in zip(range(self.samples), shown, strict=False):
            text = f"source     {source}\nmodel      {hypothesis}\nreference  {accepted[0]}\n"
            yield f"translation/sample/{n}", text
