"""When a sequence ends, what fills it up then, and what is never written."""

import dataclasses
from collections.abc import Sequence

import jax

from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.special_tokens import Ids, as_tuple, check_inside


@dataclasses.dataclass(frozen=True)
class Ending:
    """`eos_ids` end a sequence, `fill_id` stands after its end, `suppressed` are never written."""

    eos_ids: tuple[int, ...]
    fill_id: int
    suppressed: tuple[int, ...]

    @classmethod
    def of(
        cls, config: ModelConfig, eos_id: Ids, pad_id: int | None, suppress_tokens: Sequence[int]
    ) -> "Ending":
        """What the caller says, else what the config says; without a pad token, eos fills.

        Raises UserError without any eos, and for ids outside the vocabulary.
        """
        eos_ids = as_tuple(config.eos_id if eos_id is None else eos_id)
        pad_id = config.pad_id if pad_id is None else pad_id
        for field, ids in {
            "eos_id": eos_ids, "pad_id": pad_id, "suppress_tokens": tuple(suppress_tokens),
        }.items():  # fmt: skip
            check_inside(field, ids, config.vocab_size)
        if not eos_ids:
            raise UserError(
                "eos_id: neither given nor in the config, so no sequence ends; give it, or set model.eos_id"
            )
        fill_id = eos_ids[0] if pad_id is None else pad_id
        return cls(eos_ids, fill_id, tuple(suppress_tokens))

    def ends(self, token: jax.Array) -> jax.Array:
        """bool, of the tokens' shape: which of them end a sequence."""
        first, *others = self.eos_ids
        found = token == first
        for eos_id in others:
            found |= token == eos_id
        return found

    def suppress(self, scores_V: jax.Array, never: float) -> jax.Array:
        """The scores [..., V] with those of the suppressed tokens at `never`."""
        for token in self.suppressed:
            scores_V = scores_V.at[..., token].set(never)
        return scores_V
