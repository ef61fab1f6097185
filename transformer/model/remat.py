"""Rematerialization: which activations the backward pass recomputes, trading time for memory."""

import jax

REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
