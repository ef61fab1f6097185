"""What the backward pass computes again instead of keeping: memory against time."""

import jax

REMAT_POLICIES = {
    "none": None,  # keep everything
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep the outputs of weight matrices
    "full": jax.checkpoint_policies.nothing_saveable,  # keep a layer's input alone
}
