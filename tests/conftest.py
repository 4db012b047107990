"""Settings of every test: CPU unless asked, and strict array semantics."""

import os

# jax reads these when it is first imported.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_NUMPY_DTYPE_PROMOTION', 'strict')
os.environ.setdefault('JAX_NUMPY_RANK_PROMOTION', 'raise')
