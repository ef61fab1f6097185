"""Scores of translations: BLEU (sacreBLEU) and chrF of detokenized text, against all references."""

import itertools
from collections.abc import Sequence

import sacrebleu

from transformer.data.sources import Example
from transformer.decoding.generate import Generator
from transformer.evaluation.evaluators.base import EVALUATORS, Evaluator, Metrics, Snapshot, Subject
from transformer.limits import Count, Size
from transformer.output import count


def group(examples: Sequence[Example]) -> tuple[list[str], list[list[str]]]:
    """Returns the distinct sources, in order, and the distinct references of each."""
    references: dict[str, list[str]] = {}
    for source, target in examples:
        if target not in references.setdefault(source, []):
            references[source].append(target)
    return list(references), list(references.values())


Scores = tuple[dict[str, float], dict[str, str]]  # name -> score, and name -> sacreBLEU's signature


def score(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Returns `bleu` and `chrf` (0 to 100), also of the first reference alone, and signatures."""
    all_references = list(itertools.zip_longest(*references))
    first_references = [[refs[0] for refs in references]]
    scores, signatures = {}, {}
    for name, metric in {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF()}.items():
        scores[name] = metric.corpus_score(hypotheses, all_references).score
        signatures[name] = str(metric.get_signature())
        scores[f"{name}_one_reference"] = metric.corpus_score(hypotheses, first_references).score
    return scores, signatures


def exact(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Returns `exact`, the share of hypotheses that equal one of their references."""
    right = [text in accepted for text, accepted in zip(hypotheses, references, strict=True)]
    return {"exact": sum(right) / len(right)}, {}


class _OfPairs(Evaluator):
    def why_not(self, task):
        if not task.objective.has_pairs:
            return "requires translations of a source; set data.objective = 'seq2seq'"


@EVALUATORS.register("translation")
class Translation(_OfPairs):
    """BLEU, chrF and sample translations of the first validation sentences, during training.

    Decodes as `config.decoding` sets. Does nothing in `evaluate`, which translates all the text."""

    sentences: Size = 100  # validation sentences to translate
    samples: Count = 3  # translations to record as text

    def measured_text(self, task):
        return count(self.sentences, "sentence")

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields translation/bleu, translation/chrf and texts translation/sample/N."""
        if snapshot.translations is not None:
            return
        if not (examples := subject.data.examples(subject.part)):  # a mixture without pairs
            return
        if self not in subject.programs:
            tokenizer = subject.data.tokenizer
            subject.programs[self] = Generator(subject.config, snapshot.params, tokenizer)
        generate = subject.programs[self]
        generate.params = snapshot.params
        sources, references = (texts[: self.sentences] for texts in group(examples))
        hypotheses = generate(sources)
        scores, _ = score(hypotheses, references)
        yield "translation/bleu", scores["bleu"]
        yield "translation/chrf", scores["chrf"]
        shown = zip(sources, hypotheses, references, strict=True)
        for n, (source, hypothesis, accepted) in zip(range(self.samples), shown, strict=False):
            text = f"source     {source}\nmodel      {hypothesis}\nreference  {accepted[0]}\n"
            yield f"translation/sample/{n}", text


@EVALUATORS.register("bleu_by_length")
class BleuByLength(_OfPairs):
    """BLEU of translations by the number of words in the source."""

    in_training = False

    words: Size = 5  # width of each group of lengths

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields bleu_by_length/WORDS: BLEU of sources with WORDS to WORDS + `words` - 1
        whitespace-separated words. Groups with fewer than ten sources are omitted."""
        if snapshot.translations is None:
            return
        group_of = lambda translation: max(len(translation[0].split()) - 1, 0) // self.words
        translations = sorted(zip(*snapshot.translations, strict=True), key=group_of)
        for group_number, members in itertools.groupby(translations, key=group_of):
            _, hypotheses, references = zip(*members, strict=True)
            if len(hypotheses) >= 10:
                shortest = group_number * self.words + 1
                yield f"bleu_by_length/{shortest:03d}", score(hypotheses, references)[0]["bleu"]
