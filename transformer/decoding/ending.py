"""The tokens that end a sequence, fill it after its end, or are never generated."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.special_tokens import Ids, as_tuple, check_inside


@dataclasses.dataclass(frozen=True)
class Ending:
    """Tokens that end a sequence (`eos_ids`), fill it afterwards, or are never generated."""

    eos_ids: tuple[int, ...]
    fill_id: int
    suppressed: tuple[int, ...]

    @classmethod
    def of(
        cls, config: ModelConfig, eos_id: Ids, pad_id: int | None, suppress_tokens: Sequence[int]
    ) -> "Ending":
        """The tokens of the arguments, or of `config` where an argument is None.

        If there is no pad token, eos pads. Raises UserError if there is no eos, for ids outside the
        vocabulary, and if all tokens are suppressed.
        """
        eos_ids = as_tuple(config.eos_id if eos_id is None else eos_id)
        pad_id = config.pad_id if pad_id is None else pad_id
        suppressed = tuple(suppress_tokens)
        tokens = {"eos_id": eos_ids, "pad_id": pad_id, "suppress_tokens": suppressed}
        for field, ids in tokens.items():
            check_inside(field, ids, config.vocab_size)
        if not eos_ids:
            way_out = "pass eos_id, or set model.eos_id"
            raise UserError(f"eos_id: not set, so no sequence would end; {way_out}")
        if len(set(suppressed)) == config.vocab_size:
            raise UserError("suppress_tokens: the whole vocabulary; leave one token out")
        fill_id = eos_ids[0] if pad_id is None else pad_id
        return cls(eos_ids, fill_id, suppressed)

    def ends(self, token: jax.Array) -> jax.Array:
        """Whether each token ends a sequence: bool, of the same shape as `token`."""
        return jnp.isin(token, jnp.array(self.eos_ids))

    def suppress(self, scores_V: jax.Array, never: float) -> jax.Array:
        """The scores [..., V], with those of suppressed tokens set to `never`."""
        if not self.suppressed:
            return scores_V
        # A mask is fused with the operations around it; setting entries copies the scores.
        mask_V = np.isin(np.arange(scores_V.shape[-1]), self.suppressed)
        return jnp.where(mask_V, never, scores_V)
