"""The expert-parallel layer: routing, dispatch, expert records, replica gradients, expert optimizer."""
