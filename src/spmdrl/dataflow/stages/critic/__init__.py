"""The worker states that train a critic: returns of finished rows, and the update of its values on them."""
