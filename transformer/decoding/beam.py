"""Beam search with the length penalty of Wu et al. 2016.

Shape suffixes: B batch, K beams, L generated length, V vocabulary.

The score of an ended hypothesis y is log p(y) / ((5 + |y|) / 6)^alpha (Wu et al. 2016, eq. 14;
Vaswani et al. 2017, sec. 6.1), where |y| includes eos. The K best ended hypotheses of a sequence
are stored apart from its live beams. Its search stops when no live beam can beat the worst of them,
so its result does not depend on the other sequences of the batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn, struct

from transformer.decoding.config import check_numbers
from transformer.decoding.prefill import Ending, begin, decode
from transformer.decoding.sampling import largest, put
from transformer.model.cache import Cache
from transformer.model.special_tokens import Ids

NEVER = -1e9  # the score of beams and hypotheses that do not exist


@struct.dataclass
class Beams:
    """The hypotheses of each sequence: live ones, which are extended, and ended ones."""

    step_B: jax.Array
    live_BxKxL: jax.Array
    live_logp_BxK: jax.Array  # sorted, best first
    ended_BxKxL: jax.Array
    ended_score_BxK: jax.Array  # sorted, best first
    token_BxK: jax.Array  # the last tokens of the live ones, which are not in the cache yet
    limits_B: jax.Array
    cache: Cache


def length_penalty(length: jax.Array, alpha: float) -> jax.Array:
    """((5 + length) / 6)^alpha."""
    return ((5.0 + length) / 6.0) ** alpha


def beam_search(
    model: nn.Module, params: Any, prompt_BxP: jax.Array | None, limits_B: jax.Array, *,
    beam_size: int, alpha: float, max_new: int, eos_id: Ids = None, pad_id: int | None = None,
    suppress_tokens: Sequence[int] = (), source_BxS: jax.Array | None = None,
    prompt_mask_BxP: jax.Array | None = None, source_mask_BxS: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns the best hypotheses, int32[B, K, max_new], and scores, float32[B, K]; best first.

    Missing hypotheses have a score of -1e9. If no hypothesis of a sequence has ended within its
    limit, its live ones are returned, scored in the same way. `beam_size` is K. `alpha` is the
    exponent of the length penalty (0: none; higher: longer texts). Otherwise as in `sample`."""
    check_numbers(max_new=max_new, beam_size=beam_size, alpha=alpha)
    inputs = prompt_BxP, limits_B, max_new, source_BxS, prompt_mask_BxP, source_mask_BxS
    logits_BxV, cache = begin(model, params, *inputs)
    ending = Ending.of(model.config, eos_id, pad_id, suppress_tokens)
    search = BeamSearch(ending, beam_size, alpha)
    state = search.start(logits_BxV, cache, jnp.minimum(limits_B, max_new), None, max_new)
    return search.best(decode(search, model, params, state, max_new))


class BeamSearch(NamedTuple):
    """Beam search (a `Search`); the numbers are those of `beam_search`."""

    ending: Ending
    beam_size: int
    alpha: float

    def start(self, logits_BxV, cache: Cache, limits_B, keys_B, max_new: int) -> Beams:
        (batch, vocab), k = logits_BxV.shape, self.beam_size
        cache = cache.branch(k)
        blank = jnp.full((batch, k, max_new), self.ending.fill_id, jnp.int32)
        one_live = jnp.where(jnp.arange(k) == 0, 0.0, NEVER)  # all beams are equal at the start
        one_live, none = jnp.broadcast_to(one_live, (batch, k)), jnp.full((batch, k), NEVER)
        steps, token = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, k), jnp.int32)
        beams = Beams(steps, blank, one_live, blank, none, token, limits_B, cache)
        logits_BxKxV = jnp.broadcast_to(logits_BxV[:, None], (batch, k, vocab))
        return self._extend(beams, logits_BxKxV, cache)

    def active(self, beams: Beams) -> jax.Array:
        """Whether a live beam can still beat the worst ended hypothesis that is kept. No score
        exceeds the present one at the largest penalty, as log-probabilities only decrease."""
        logp_B, worst_B = beams.live_logp_BxK[:, 0], beams.ended_score_BxK[:, -1]
        can_beat_B = logp_B / length_penalty(beams.limits_B, self.alpha) > worst_B
        return (beams.step_B < beams.limits_B) & (logp_B > NEVER / 2) & can_beat_B

    def step(self, read: Callable, beams: Beams) -> Beams:
        logits, cache = read(beams.token_BxK.reshape(-1), beams.cache)
        logits_BxKxV = logits.reshape(*beams.token_BxK.shape, -1)
        return self._extend(beams, logits_BxKxV, cache)

    def texts(self, beams: Beams) -> jax.Array:
        return self.best(beams)[0][:, 0]

    def best(self, beams: Beams) -> tuple[jax.Array, jax.Array]:
        """(hypotheses, scores) of each sequence: the ended ones or, without any, the live ones."""
        none_ended_B = beams.ended_score_BxK[:, :1] <= NEVER / 2
        live_score = beams.live_logp_BxK / length_penalty(beams.limits_B[:, None], self.alpha)
        live_score = jnp.where(beams.live_logp_BxK > NEVER / 2, live_score, NEVER)
        text = jnp.where(none_ended_B[..., None], beams.live_BxKxL, beams.ended_BxKxL)
        return text, jnp.where(none_ended_B, live_score, beams.ended_score_BxK)

    def _extend(self, beams: Beams, logits_BxKxV: jax.Array, cache: Cache) -> Beams:
        """Returns the beams with one more token, chosen from the logits after `cache`."""
        batch, k, vocab = logits_BxKxV.shape
        open_B = beams.step_B < beams.limits_B
        normalizer_BxK = jax.nn.logsumexp(logits_BxKxV, axis=-1)
        # Each beam ends in as many ways as there are eos tokens. So at least k of these do not end.
        candidates = min((1 + len(self.ending.eos_ids)) * k, k * vocab)
        each = min(candidates, vocab)
        allowed = self.ending.suppress(logits_BxKxV, -jnp.inf).reshape(batch * k, vocab)
        logits, token = (x.reshape(batch, k, each) for x in largest(allowed, each))
        logp = jnp.maximum(logits + (beams.live_logp_BxK - normalizer_BxK)[..., None], NEVER)
        top_logp, best = jax.lax.top_k(logp.reshape(batch, -1), candidates)
        from_beam, token = best // each, jnp.take_along_axis(token.reshape(batch, -1), best, axis=1)
        text = jnp.take_along_axis(beams.live_BxKxL, from_beam[..., None], axis=1)
        text = put(text, beams.step_B, token)
        real_logp = jnp.where(open_B[:, None] & (top_logp > NEVER / 2), top_logp, NEVER)
        ends, penalty_B = self.ending.ends(token), length_penalty(beams.step_B + 1, self.alpha)
        score = jnp.where(ends & (real_logp > NEVER / 2), real_logp / penalty_B[:, None], NEVER)
        ended_score, best = jax.lax.top_k(jnp.concatenate([beams.ended_score_BxK, score], 1), k)
        all_text = jnp.concatenate([beams.ended_BxKxL, text], 1)
        ended = jnp.take_along_axis(all_text, best[..., None], axis=1)

        live_logp, best = jax.lax.top_k(jnp.where(ends, NEVER, real_logp), k)
        pick = lambda x: jnp.take_along_axis(x, jnp.expand_dims(best, range(2, x.ndim)), axis=1)
        keep = lambda new, old: jnp.where(jnp.expand_dims(open_B, range(1, new.ndim)), new, old)
        live = keep(pick(text), beams.live_BxKxL), keep(live_logp, beams.live_logp_BxK)
        old_rows = (jnp.arange(batch)[:, None] * k + pick(from_beam)).reshape(-1)
        cache, hypotheses = cache.reorder(lambda x: x[old_rows]), (*live, ended, ended_score)
        return Beams(beams.step_B + 1, *hypotheses, pick(token), beams.limits_B, cache)
