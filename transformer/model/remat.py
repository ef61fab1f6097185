"""Rematerialization: which activations the backward pass recomputes, trading time for memory."""

import jax

REMAT_POLICIES = {
    # Keep all activations.
    "none": None,
    # Keep the products with weight matrices.
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # Keep only the input of each layer.
    "full": jax.checkpoint_policies.nothing_saveable,
}
